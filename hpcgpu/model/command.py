"""Commands and waits: a command to run and its result, exponential backoff, the time for a batch system's answers.

Pure code builds a command, only :mod:`hpcgpu.host` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

TIMED_OUT = 124  # a command's exit code, as timeout(1) has it


@dataclass(frozen=True, slots=True)
class Command:
    """An argv (never a shell line) with its standard input, environment and time limit."""

    argv: tuple[str, ...]
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # added to the environment
    timeout_s: float = 60.0
    without: frozenset[str] = frozenset()  # variables to remove from the environment


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one :class:`Command`."""

    argv: tuple[str, ...]
    returncode: int  # 127: the program does not exist; TIMED_OUT: killed after timeout_s
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was left running; pid and start time identify it, as pids are reused."""

    pid: int
    start_time: int  # in clock ticks since boot


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
        before = (
            self
            if now_s - self.failed_s < self.wait_s + self.calm_s
            else replace(self, failures=0, reported=frozenset())
        )
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
