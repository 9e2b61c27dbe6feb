"""Which units go down next. Pure: candidates in, choice out.

The order is that of the last use, longest ago first, with two changes. What a task that is ready needs goes after
everything else, what a running one needs last; among those that are ready, what runs latest goes first. And a caller
may hand in what has a valid copy below as a group of its own, which goes first: moving it down costs nothing.

The first candidates in this order that cover the need are the window. Nothing outside is ever taken, except what is
exactly as old as the last in it. Inside, what is clean goes first, then the biggest, so that there are few moves; but
where one alone covers what is left, the smallest that does: a huge one stays if a small one of the window suffices. At
last what is needless stays: without any one of the chosen the need would not be covered.

``benchmarks/spill_policy.py`` tells what each rule is worth: bytes moved beside plain LRU, a geometric mean over graphs
and stores of 30, 50 and 80 % of the peak (dask 2026.8.0). Where it is known which tasks are ready, but not which of
them runs first, 0.87, yet 1.6 on a matrix product, where half of the tasks are ready and what has just been made goes
in favour of what is needed late. With their priorities 0.76, and nowhere above 1.005; with the window 0.75, and with
what is clean as a first group 0.74. With :func:`headroom` in place of a need that is 5 % larger, as the state machine
has it, 0.72. An oracle has 0.70. Windows of two to eight times the need are no better, and take what is young.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple


class Candidate(NamedTuple):
    """A unit that may be moved. Immutable; :class:`hpcgpu.spill.state.tiers.Tiers` makes it, under the store's lock.

    Attributes
    ----------
    name, nbytes : int
        The unit's, and its bytes.
    age : int
        When it was last touched; smaller is longer ago.
    pinned : bool
        A running task uses it; moving it would free nothing.
    needed : int
        How soon a task needs it: 0 as far as is known not at all, 1 a task that is ready, 2 one that runs or is next.
    clean : bool
        The tier below has a valid copy: moving it down copies nothing.
    priority : tuple[float, ...]
        Of what is ``needed``: the priority of the first task that needs it, as distributed has it (the smaller runs
        sooner). ``()`` for all where it is not known; then age decides.

    """

    name: int
    age: int
    nbytes: int
    pinned: bool = False
    needed: int = 0
    clean: bool = False
    priority: tuple[float, ...] = ()


def victims(candidates: Iterable[Candidate], need_bytes: int) -> Iterator[Candidate]:
    """Yield what to move, in this order, to free ``need_bytes``; all that is not pinned where that is not enough.

    ``candidates`` come longest untouched first. Those looked at are the window, the one after it, and what is pinned or
    needed before it.
    """
    return victims_of([candidates], need_bytes)


def victims_of(groups: Sequence[Iterable[Candidate]], need_bytes: int) -> Iterator[Candidate]:
    """Yield what to move, as :func:`victims` does, from several groups, the first of them first.

    Each group comes longest untouched first; no unit is in two. With what is clean as a group before the rest, all of
    it that no task needs goes before anything that must be copied.
    """
    chosen: list[Candidate] = []
    left = need_bytes
    for _, equals in groupby(_window(_in_order(groups), need_bytes), key=lambda c: (c.needed, c.priority)):
        part = list(equals)
        for clean in (True, False):
            found = _biggest_first([c for c in part if c.clean is clean], left)
            left -= sum(c.nbytes for c in found)
            chosen += found
    needless = set()
    for candidate in reversed(chosen):
        if left + candidate.nbytes <= 0:
            left += candidate.nbytes
            needless.add(candidate.name)
    yield from (c for c in chosen if c.name not in needless)


def headroom(candidates: Iterable[Candidate], most_bytes: int) -> Iterator[Candidate]:
    """Yield the longest untouched, until one is needed or more than ``most_bytes`` in all, so that the next fit.

    Nothing is chosen for it: of two that take turns, what is clean would go each time, while an old one stays for ever.
    """
    for candidate in candidates:
        most_bytes -= candidate.nbytes
        if most_bytes < 0 or candidate.needed:
            return
        if not candidate.pinned:
            yield candidate


def _in_order(groups: Iterable[Iterable[Candidate]]) -> Iterator[Candidate]:
    needed = []
    for candidate in chain.from_iterable(groups):
        if candidate.needed:
            needed += [] if candidate.pinned else [candidate]
        elif not candidate.pinned:
            yield candidate
    needed.sort(key=lambda c: c.priority, reverse=True)
    needed.sort(key=lambda c: c.needed)
    yield from needed


def _window(candidates: Iterable[Candidate], need_bytes: int) -> Iterator[Candidate]:
    """Yield the first that cover the need, and what equals the last of them."""
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
    """Take the biggest, until one alone covers the rest: then the smallest that does; of one size the oldest."""
    sizes = sorted(reversed(candidates), key=lambda c: c.nbytes)
    taken = []
    while sizes and need_bytes > 0:
        enough = bisect_left(sizes, need_bytes, key=lambda c: c.nbytes)
        size = sizes[min(enough, len(sizes) - 1)].nbytes
        taken.append(sizes.pop(bisect_right(sizes, size, key=lambda c: c.nbytes) - 1))
        need_bytes -= size
    return taken
