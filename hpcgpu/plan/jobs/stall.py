"""Nothing goes on any more: all workers have paused, none computes, and no memory becomes free."""

from __future__ import annotations

from dataclasses import dataclass

# Of the workers' memory: so much less between two looks is the store that still writes to disk.
_LESS = 0.01


@dataclass(frozen=True, slots=True)
class Stall:
    """Since when nothing goes on, and what memory the workers had then."""

    since_s: float
    memory_bytes: int


def look(before: Stall | None, stuck: bool, memory_bytes: int, now_s: float) -> Stall | None:
    """Return since when nothing goes on; None when something does.

    Parameters
    ----------
    before : Stall or None
        What the look before this one returned.
    stuck : bool
        All workers have paused, none computes, and there are tasks to be computed.
    memory_bytes : int
        What the workers have of memory, together.
    now_s : float
        Of a clock that does not go back.

    """
    if not stuck:
        return None
    if before is None or memory_bytes < before.memory_bytes * (1 - _LESS):
        return Stall(now_s, memory_bytes)
    return before
