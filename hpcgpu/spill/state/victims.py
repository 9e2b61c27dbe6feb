"""The choice of the units that go down next.

The order of the units that go down is that of the last use, longest ago first. But units that a ready task needs go
after all others, those of the latest task first, and units that a running task needs go last. The first candidates in
this order that cover the need are the window. No unit outside the window is taken, except units as old as its last one.
Inside, clean units go first, then the biggest, so that there are few moves. But if one unit alone covers the rest of
the need, the smallest such unit goes: a huge one stays if a small one suffices. At last needless ones stay: without any
one of the chosen units the need would not be covered.

``benchmarks/spill_policy.py`` measures each rule: bytes moved, relative to plain LRU, as a geometric mean over graphs
and stores of 30, 50 and 80 % of the peak (dask 2026.8.0). If the ready tasks are known, but not which of them runs
first: 0.87, yet 1.6 on a matrix product. With the tasks' priorities 0.76, and never above 1.005; with the window 0.75,
with clean units first 0.74; with :func:`headroom` instead of a need that is 5 % larger 0.72. An oracle has 0.70.
Windows of two to eight times the need are no better, and take young units.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple


class Candidate(NamedTuple):
    """A unit that may go down. Immutable; Accounting makes it, under the store's lock."""

    name: int  # the unit's
    age: int  # the time of its last use; smaller is longer ago
    nbytes: int
    needed: int = 0  # how soon a task needs it: 0 no known task, 1 a ready task, 2 a task that runs or is next
    clean: bool = False  # the tier below has a valid copy: to move it down copies no bytes
    # if ``needed``, the priority of the first such task, as distributed has it (the smaller runs sooner); () for all
    # candidates if priorities are not known: then age decides
    priority: tuple[float, ...] = ()


def victims(candidates: Iterable[Candidate], need_bytes: int) -> Iterator[Candidate]:
    """Yield the candidates to move, in this order, to free ``need_bytes``; they come longest untouched first."""
    chosen: list[Candidate] = []
    left = need_bytes
    for _, equals in groupby(_window(_in_order(candidates), need_bytes), key=lambda c: (c.needed, c.priority)):
        part = list(equals)
        for clean in (True, False):
            biggest = _biggest_first([c for c in part if c.clean is clean], left)
            left -= sum(c.nbytes for c in biggest)
            chosen += biggest
    needless = set()
    for candidate in reversed(chosen):
        if left + candidate.nbytes <= 0:
            left += candidate.nbytes
            needless.add(candidate.name)
    yield from (c for c in chosen if c.name not in needless)


def headroom(candidates: Iterable[Candidate], most_bytes: int) -> Iterator[Candidate]:
    """Yield the longest untouched, until one is needed or ``most_bytes`` are exceeded, so that the next units fit."""
    for candidate in candidates:
        most_bytes -= candidate.nbytes
        # sizes and copies do not count: of two units that take turns the clean one would go each time, an old one stay
        if most_bytes < 0 or candidate.needed:
            return
        yield candidate


def _in_order(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    needed = []
    for candidate in candidates:
        if candidate.needed:
            needed.append(candidate)
        else:
            yield candidate
    needed.sort(key=lambda c: c.priority, reverse=True)
    yield from sorted(needed, key=lambda c: c.needed)


def _window(candidates: Iterable[Candidate], need_bytes: int) -> Iterator[Candidate]:
    """Yield the first candidates that cover the need, and those that rank with the last of them."""
    last = None
    if need_bytes <= 0:
        return
    for candidate in candidates:
        rank = candidate.needed, candidate.priority, candidate.age
        if need_bytes <= 0 and rank != last:
            return
        yield candidate
        need_bytes -= candidate.nbytes
        last = rank


def _biggest_first(candidates: list[Candidate], need_bytes: int) -> list[Candidate]:
    """Take the biggest, until one alone covers the rest: then the smallest such one; of one size the oldest."""
    sizes = sorted(reversed(candidates), key=lambda c: c.nbytes)
    taken = []
    while sizes and need_bytes > 0:
        enough = bisect_left(sizes, need_bytes, key=lambda c: c.nbytes)
        size = sizes[min(enough, len(sizes) - 1)].nbytes
        taken.append(sizes.pop(bisect_right(sizes, size, key=lambda c: c.nbytes) - 1))
        need_bytes -= size
    return taken
