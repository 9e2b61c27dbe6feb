"""How long a cluster object waits for its batch system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for an answer of the batch system, and how often to poll it.

    All users share a batch system, and a cluster survives one that is slow or down for a while. So these are no
    options. Tests have their own batch system, and wait less.

    Attributes
    ----------
    submission_s : float
        A submission without an answer after this time is killed; the job may have been submitted nevertheless.
    retries_s : tuple of float
        After each of these waits the job is looked for and, except after the last, submitted again.
    ask_s : float
        Between two polls when something is new.
    news_s : float
        Between two polls when news is likely, and before the first poll.
    refused_s : float
        Before the next submission after a transient refusal, and before the next poll after no answer.

    """

    submission_s: float = 60.0
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0, 4.0)
    ask_s: float = 5.0
    news_s: float = 1.0
    refused_s: float = 30.0
