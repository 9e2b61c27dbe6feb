"""Units, threads that wait for them, and instructions: what the store's decisions are about, and what they ask for.

All sizes are in bytes. The machine changes Unit, Ticket and FailedAllocation, only under the store's lock. The
instructions (Copy, Drop, Trim, Answer, Say, Leave) are immutable. :class:`hpcgpu.spill.store.executor.Executor` carries
them out in the thread that reported the event; a Copy in the thread that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """The reason for which a thread waits. The machine names it in instructions; its fields are for threads alone.

    Only its thread changes ``taken``; ``sent`` changes under the store's lock; another thread sets ``error``, then
    ``answered``, and wakes the thread by its inbox.
    """

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

    def facts(self) -> tuple[Any, ...]:
        """Return what its reader asks for, for the machine's history."""
        return id(self), self.units, self.writes, self.for_peer, self.stays, self.at_once

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
