"""The next step after the batch system has refused a submission, or has not answered it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from hpcgpu.errors import SubmitError

# Of host.run: the program took too long, or does not exist.
TIMED_OUT, NOT_THERE = 124, 127


class Step(enum.Enum):
    """The next step.

    ``PAUSE``: wait, then look for the jobs if the refusal is unsure. ``SUBMIT``: submit once more. All others raise the
    refusal: ``RAISE`` as it is, ``NAME_CLUSTER`` with where jobs are submitted, ``NAME_LACK`` with what is missing.
    """

    PAUSE = "pause"
    SUBMIT = "submit"
    RAISE = "raise"
    NAME_CLUSTER = "name the cluster"
    NAME_LACK = "name the lack"


def after_refusal(refusal: SubmitError, returncode: int, pauses: int) -> Step:
    """Return the step after a refusal.

    Parameters
    ----------
    refusal : SubmitError
        In the batch system's words.
    returncode : int
        Exit code of the submitting program.
    pauses : int
        How many are left.

    """
    if returncode == NOT_THERE:
        return Step.NAME_CLUSTER
    if refusal.over_limit:
        return Step.RAISE
    if not refusal.transient:  # a batch system does not name the resource that it lacks
        return Step.NAME_LACK
    return Step.PAUSE if pauses else Step.RAISE


def after_pause(found: Sequence[str] | None, returncode: int, pauses: int) -> Step:
    """Return the step after a pause in which the jobs were not found.

    Parameters
    ----------
    found : sequence of str or None
        Empty: the jobs are not there. None: the batch system does not say it.
    returncode : int
        Exit code of the submitting program.
    pauses : int
        How many are left.

    """
    if found is None:
        return Step.PAUSE if pauses else Step.RAISE
    # after a time-out the job may still come: a second one would be one too many
    return Step.SUBMIT if pauses and returncode != TIMED_OUT else Step.RAISE
