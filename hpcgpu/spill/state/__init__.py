"""The decisions of the spill store, pure: events in, instructions out; no threads, no I/O, no clock.

Callers use ``machine`` only, which has the events and the laws, units on their way up, the needs of tasks and failed
allocations. ``accounting`` counts bytes, and decides which units go down. Here are the nouns, units, waiting threads
and instructions, and the choice of the units that go down next. All sizes are in bytes.

The machine changes Unit, Ticket and FailedAllocation, only under the store's lock. The instructions (Copy, Drop, Trim,
Answer, Say, Leave) are immutable. :class:`hpcgpu.spill.store.executor.Executor` carries them out in the thread
that reported the event; a Copy in the thread that it names.

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
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

# A tier has a limit and a count of bytes. The tiers of further devices are DEVICE + 1, DEVICE + 2, ...
DISK, HOST, DEVICE = range(3)


def tiers_in(bits: int) -> Iterator[int]:
    """Yield the tiers of a set of bits."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def below(tier: int) -> int:
    """Return the next tier down from a device or from host memory."""
    return HOST if tier > HOST else DISK


class Unit:
    """Bytes that move together. There may be a million units, so usual values are attributes of the class."""

    disk_bytes: int = 0  # its size on disk, if known; 0: nbytes
    valid: int = 0  # the tiers that hold its present contents, as bits: 1 << tier; 0: no key names it
    tier: int = -1  # the highest of these tiers; -1: there is none
    keys: int = 0  # the number of keys that name it
    pins: int = 0  # the number of tickets that need it
    age: int = 0  # the time of its last use; smaller is longer ago
    move: int | None = None  # the tier to which a copy of it is under way; the copy comes from ``tier``
    dirty: bool = False  # code outside of tasks has the object and may write to it, so copies below do not count
    fixed: bool = False  # it can never be copied down (it cannot be pickled)
    lost: Exception | None = None  # the reason why it cannot be read back
    waiters: tuple[Ticket, ...] = ()  # the tickets that wait for it
    waiting: dict[Any, tuple[Any, ...]] | None = None  # the priorities of the ready tasks that need it, by task
    running: int = 0  # the number of running tasks that need it

    def __init__(self, name: int, nbytes: int, top: int = DEVICE, at: int = DEVICE) -> None:
        self.name, self.nbytes = name, nbytes  # a number of its own; bytes on the device or in host memory
        self.top, self.at = top, at  # the tier in which it is used; the tier of its data when the first key names it

    @property
    def is_clean(self) -> bool:
        """True if it has a valid copy below its tier."""
        return self.valid & (self.valid - 1) != 0

    def size(self, tier: int) -> int:
        """Return its size in a tier."""
        return self.disk_bytes or self.nbytes if tier == DISK else self.nbytes


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """The reason for which a thread waits. The machine names it in instructions; its fields are for threads alone."""

    # only its thread changes ``taken``; ``sent`` changes under the store's lock; another thread sets ``error``, then
    # ``answered``, and wakes the thread by its inbox
    inbox: Any = None  # of its thread
    sent: int = 0  # the number of copies sent there
    taken: int = 0  # the number of these taken out
    answered: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Ticket(Waiter):
    """A thread's need for units: they are pinned until the ticket is released."""

    units: tuple[Unit, ...]  # each once
    writes: bool = False  # the reader may keep the objects and write to them: an actor, a client in a task
    for_peer: bool = False  # bytes in host memory suffice: they are sent to another worker
    stays: bool = False  # no unit comes up: the units only go no further down
    at_once: bool = False  # does not wait for room: its thread is inside a copy down, for which others may wait
    missing: int = 0  # the number of units that are not up
    over: bool = False  # it was resumed, has failed, or was given up

    def lacks(self, unit: Unit) -> bool:
        """Tell whether a unit is below the tier in which this ticket needs it."""
        return not self.stays and unit.tier < (HOST if self.for_peer else unit.top)


@dataclass(slots=True, eq=False)
class FailedAllocation(Waiter):
    """An allocation that has failed: its thread waits until ``nbytes`` of a device are freed."""

    tier: int
    nbytes: int
    until_bytes: int = 0  # the count of freed bytes at which it has room
    had_bytes: int = 0  # the count at its beginning


class Copy(NamedTuple):
    """Copy a unit, in the thread of ``by`` (None: the spill thread), then report ``moved`` or ``failed``."""

    unit: Unit
    source: int
    to: int
    by: Waiter | None
    nbytes: int  # set aside for it in its new tier
    age: int  # the unit's, at the decision to copy


class Drop(NamedTuple):
    """Give up the data of a unit in a tier."""

    unit: Unit
    tier: int
    may_be_read: bool = False  # kernels of finished tasks may still read it there


class Trim(NamedTuple):
    """Give memory that a tier keeps for reuse back to the system: all, or what has no room beside the tier's data."""

    tier: int
    excess: bool = False


class Answer(NamedTuple):
    """Let a thread continue: its units are up, or it has room, and all drops before this instruction are done."""

    waiter: Waiter
    error: Exception | None = None  # the reason why not; for an allocation MemoryError: no more units can go


class Say(NamedTuple):
    """Log that a tier stays above its limit, or fits again, or that a unit is immovable."""

    event: Literal["stays", "fits", "immovable"]
    tier: int
    nbytes: int
    error: Exception | None


class Leave(NamedTuple):
    """Leave the cluster: a unit is lost, and others would wait for its key for ever; or the GPU is lost."""

    error: Exception


Instruction = Copy | Drop | Trim | Answer | Say | Leave


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
    # sizes and copies do not count: of two units that take turns the clean one would go each time, and an old one stay
    for candidate in candidates:
        most_bytes -= candidate.nbytes
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
