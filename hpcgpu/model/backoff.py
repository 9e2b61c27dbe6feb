"""Exponential backoff for work that fails repeatedly; each reason is reported once."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Backoff:
    """Count failures in a row, and compute the wait before the next try."""

    first_s: float = 0.5  # the wait after the first failure; doubles with each further one
    longest_s: float = 30.0  # the longest wait
    calm_s: float = 60.0  # after so long without a failure, the next one counts as the first
    failures: int = 0  # in a row, so far
    wait_s: float = 0.0  # before the next try
    is_new: bool = False  # the last failure has a reason that was not reported before
    said: frozenset[str] = frozenset()
    failed_s: float = float("-inf")

    def failed(self, reason: str, now_s: float) -> Backoff:
        """Return the backoff after one more failure; ``now_s`` is of a monotonic clock."""
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
