"""The time that a cluster object waits for its batch system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Waits for the batch system's answers, and intervals of polls.

    All users share a batch system, and a cluster survives one that is slow or down for a while. So these are no
    options. Tests have a batch system of their own, and wait less.
    """

    # a submission without an answer is killed then; the job may have been submitted nevertheless
    submission_s: float = 60.0
    # after each wait the job is searched for and, except after the last, submitted again
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0, 4.0)
    ask_s: float = 5.0  # between two polls when something is new
    news_s: float = 1.0  # between two polls when news is likely, and before the first poll
    refused_s: float = 30.0  # before the next submission after a transient refusal, or the next poll after no answer
