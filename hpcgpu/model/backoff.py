"""Exponential backoff for work that fails repeatedly; each reason is reported once."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Backoff:
    """The failures in a row, and so what to do now.

    Attributes
    ----------
    first_s, longest_s : float
        The wait after the first failure, doubled with each further one up to the longest.
    calm_s : float
        After so long without a failure the next failure counts as the first.
    failures : int
        The number of failures so far.
    wait_s : float
        How long to wait before the next try.
    is_new : bool
        Whether the last failure has a reason that has not been reported.

    """

    first_s: float = 0.5
    longest_s: float = 30.0
    calm_s: float = 60.0
    failures: int = 0
    wait_s: float = 0.0
    is_new: bool = False
    said: frozenset[str] = frozenset()
    failed_s: float = float("-inf")

    def failed(self, reason: str, now_s: float) -> Backoff:
        """Return the backoff after one more failure, at a time of a monotonic clock."""
        before = (
            self if now_s - self.failed_s < self.wait_s + self.calm_s else replace(self, failures=0, said=frozenset())
        )
        return replace(
            before,
            failures=before.failures + 1,
            wait_s=min(self.longest_s, self.first_s * 2.0 ** min(before.failures, 64)),
            is_new=reason not in before.said,
            said=before.said | {reason},
            failed_s=now_s,
        )
