"""Waits: between tries after failures, and between questions to a batch system."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Some sites' qstat or squeue answers from a file that is minutes old (NCAR): a new job is in the next one.
UNLISTED_S = 300.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Count failures in a row, and compute the wait before the next try."""

    first_s: float = 0.5  # the wait after the first failure; doubles with each further one
    longest_s: float = 30.0  # the longest wait
    calm_s: float = 60.0  # after so long without a failure, the next one counts as the first
    failures: int = 0  # in a row, so far
    wait_s: float = 0.0  # before the next try
    is_new: bool = False  # the last failure has a reason that was not reported before
    reported: frozenset[str] = frozenset()
    failed_s: float = float("-inf")

    def failed(self, reason: str, now_s: float) -> Backoff:
        """Return the backoff after one more failure; ``now_s`` is of a monotonic clock."""
        is_calm = now_s - self.failed_s >= self.wait_s + self.calm_s
        before = replace(self, failures=0, reported=frozenset()) if is_calm else self
        return replace(
            before,
            failures=before.failures + 1,
            wait_s=min(self.longest_s, self.first_s * 2.0 ** min(before.failures, 64)),
            is_new=reason not in before.reported,
            reported=before.reported | {reason},
            failed_s=now_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Waits for the batch system's answers, and all intervals of questions: no options, since all users share it."""

    # a submission without an answer is killed then; the job may have been submitted nevertheless
    submission_s: float = 60.0
    # after each wait the job is submitted again or, if the answer was lost, searched for
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0, 4.0)
    ask_s: float = 5.0  # between two polls when something is new, and a guard's searches for jobs of a lost answer
    news_s: float = 1.0  # between two polls when news is likely, and before the first poll
    longest_s: float = 60.0  # between two polls of a job without news
    growth: float = 6.0  # until then the interval is the time since the last change, divided by this
    refused_s: float = 30.0  # before the next submission after a transient refusal, or the next poll after no answer
    # before the next submission after a lost answer, while no answer of a search or a poll has listed its job
    unlisted_s: float = UNLISTED_S
    by_itself_s: float = 0.5  # between two polls of jobs that are about to end by themselves
    # such a poll is cut off then: squeue tells after 40 s that slurmctld is away (22.05.8), or later (SlurmctldTimeout)
    silence_s: float = 3.0
    # between the first two polls of cancelled jobs, then half as much again each time until ``guard_s``: most are gone
    # within a second, others only after the batch system's KillWait
    cancelled_s: float = 0.25
    # between two cancels: one takes effect within the batch system's KillWait, a refused one may be accepted later
    cancel_s: float = 15.0
    guard_s: float = 2.0  # between polls by a guard or the doctor, and all polls while the batch system is away
