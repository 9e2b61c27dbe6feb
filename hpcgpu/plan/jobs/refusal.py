"""Decide the next step after the batch system has refused a submission, or has not answered it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from hpcgpu.errors import SubmitError

# Return codes of host.run: the program timed out, or does not exist.
TIMED_OUT, NOT_THERE = 124, 127


class Step(enum.Enum):
    """The next step; all but PAUSE and SUBMIT raise the refusal."""

    PAUSE = "pause"  # wait, then look for the jobs if the refusal is unsure
    SUBMIT = "submit"  # once more
    RAISE = "raise"  # as it is
    NAME_CLUSTER = "name the cluster"  # add where jobs are submitted
    NAME_LACK = "name the lack"  # add what is missing


def after_refusal(refusal: SubmitError, returncode: int, pauses: int) -> Step:
    """Return the step after a refusal; ``pauses`` are left, ``returncode`` is the submitting program's."""
    if returncode == NOT_THERE:
        return Step.NAME_CLUSTER
    if refusal.over_limit:
        return Step.RAISE
    if not refusal.transient:  # batch systems do not name the missing resource
        return Step.NAME_LACK
    return Step.PAUSE if pauses else Step.RAISE


def after_pause(jobs: Sequence[str] | None, returncode: int, pauses: int) -> Step:
    """Return the step after a pause without finding the jobs: () they do not exist, None no answer.

    ``pauses`` are left, ``returncode`` is the submitting program's.
    """
    if jobs is None:
        return Step.PAUSE if pauses else Step.RAISE
    # after a time-out the job may still appear: do not submit a second one
    return Step.SUBMIT if pauses and returncode != TIMED_OUT else Step.RAISE
