"""Detect a stalled cluster: all workers have paused, none computes, and no memory becomes free."""

from __future__ import annotations

from dataclasses import dataclass

# If the workers' memory shrinks by a larger fraction between two checks, the store still writes to disk.
_LESS = 0.01


@dataclass(frozen=True, slots=True)
class Stall:
    """Since when the cluster has stalled, and the workers' memory at that time."""

    since_s: float
    memory_bytes: int


def look(before: Stall | None, stuck: bool, memory_bytes: int, now_s: float) -> Stall | None:
    """Return the stall, given the previous one; None if the cluster makes progress. ``now_s`` is monotonic.

    ``stuck``: all workers have paused, none computes, and there are tasks to compute. ``memory_bytes``: of all workers.
    """
    if not stuck:
        return None
    if before is None or memory_bytes < before.memory_bytes * (1 - _LESS):
        return Stall(now_s, memory_bytes)
    return before
