"""A cluster that has stalled: all workers have paused, none computes, and no memory becomes free."""

from __future__ import annotations

from dataclasses import dataclass

# Fraction of the workers' memory. If it shrinks by more between two looks, the store still writes to disk.
_LESS = 0.01


@dataclass(frozen=True, slots=True)
class Stall:
    """Since when the cluster has stalled, and the workers' memory at that time."""

    since_s: float
    memory_bytes: int


def look(before: Stall | None, stuck: bool, memory_bytes: int, now_s: float) -> Stall | None:
    """Return the stall, if there is one; None if the cluster makes progress.

    Parameters
    ----------
    before : Stall or None
        The result of the previous look.
    stuck : bool
        All workers have paused, none computes, and there are tasks to be computed.
    memory_bytes : int
        The memory of all workers.
    now_s : float
        Of a monotonic clock.

    """
    if not stuck:
        return None
    if before is None or memory_bytes < before.memory_bytes * (1 - _LESS):
        return Stall(now_s, memory_bytes)
    return before
