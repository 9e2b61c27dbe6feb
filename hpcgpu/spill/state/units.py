"""The nouns of the state machine: what moves, who asks, and what is to be done. All sizes are in bytes.

The machine changes Unit, Ticket and Room under the store's lock alone. The instructions (Copy, Drop, Release, Resume,
Fail, Say, Leave) are immutable: SpillState and its parts make them under that lock, and
:class:`hpcgpu.spill.store.executor.Executor` carries them out in the thread that told of the event; a Copy in the one
that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# A place has a limit and a count of bytes. The places of further devices are DEVICE + 1, DEVICE + 2, ...
DISK, HOST, DEVICE = range(3)


def places_in(bits: int) -> Iterator[int]:
    """Yield the places of a set of bits."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def below(place: int) -> int:
    """Return the place to which moving down leads from a device or from host memory."""
    return HOST if place > HOST else DISK


class Unit:
    """Bytes that move as one. A million of them: what is usual stands in the class, and is set where it changes.

    The store makes :class:`hpcgpu.spill.values.unit.Content` of it, which also holds the objects.

    Attributes
    ----------
    name : int
        Of this unit alone.
    nbytes : int
        On the device or in host memory.
    top : int
        The place where it is used: a device, or HOST.
    at : int
        The place where it lies when the first key names it.
    disk_bytes : int
        What it takes on disk, once that is known; 0: ``nbytes``.
    valid : int
        Places that hold its present contents, as bits: ``1 << place``. 0: no key names it.
    tier : int
        The highest of them; -1: none.
    keys, pins : int
        How many keys name it; how many tickets need it.
    age : int
        When it was last touched; smaller is longer ago.
    move : int or None
        The place that the copy under way goes to; it comes from ``tier``.
    dirty : bool
        Code outside of a task has the object and may write to it at any time: a copy below is worth nothing.
    fixed : bool
        It cannot be copied down, however often one tries (it cannot be pickled).
    lost : Exception or None
        Why it cannot be read back.
    waiters : tuple of Ticket
        Those that wait until it is up.
    waiting : dict or None
        Priorities of the tasks that are ready and need it.
    running : int
        How many tasks that run need it.

    """

    disk_bytes: int = 0
    valid: int = 0
    tier: int = -1
    keys: int = 0
    pins: int = 0
    age: int = 0
    move: int | None = None
    dirty: bool = False
    fixed: bool = False
    lost: Exception | None = None
    waiters: tuple[Ticket, ...] = ()
    waiting: dict[Any, tuple[Any, ...]] | None = None
    running: int = 0

    def __init__(self, name: int, nbytes: int, top: int = DEVICE, at: int = DEVICE) -> None:
        self.name, self.nbytes, self.top, self.at = name, nbytes, top, at

    @property
    def is_clean(self) -> bool:
        """Whether there is a valid copy below its tier."""
        return self.valid & (self.valid - 1) != 0

    def size(self, place: int) -> int:
        """Return the bytes that it takes in a place."""
        return self.disk_bytes or self.nbytes if place == DISK else self.nbytes


@dataclass(slots=True, eq=False)
class Ticket:
    """Somebody who needs units: they are pinned until the ticket is released, in any case.

    Executor makes it, as :class:`hpcgpu.spill.store.inbox.Reader`, in the thread that reads.

    Attributes
    ----------
    units : tuple of Unit
        Each once.
    writes : bool
        Who gets them may keep them and write to them: an actor, a client in a task, the write to a proxy.
    for_peer : bool
        Host bytes will do: they are sent to another worker, and nothing goes through the device.
    stays : bool
        Nothing comes up for it: its units only go no further down.
    at_once : bool
        It does not wait for room: it comes from within a copy down, for which others may wait.
    missing : int
        How many units are not up.
    over : bool
        It was resumed, has failed, or was given up.

    """

    units: tuple[Unit, ...]
    writes: bool = False
    for_peer: bool = False
    stays: bool = False
    at_once: bool = False
    missing: int = 0
    over: bool = False

    def lacks(self, unit: Unit) -> bool:
        """Tell whether a unit is below where this ticket needs it."""
        return not self.stays and unit.tier < (HOST if self.for_peer else unit.top)


@dataclass(slots=True, eq=False)
class Room:
    """An allocation that has failed: a thread waits until so many bytes of a device have been freed.

    ``until_bytes`` is the count of freed bytes at which that is so, ``had_bytes`` the count when it came.
    Executor makes it, as :class:`hpcgpu.spill.store.inbox.Allocation`, in that thread.
    """

    place: int
    nbytes: int
    until_bytes: int = 0
    had_bytes: int = 0


class Copy(NamedTuple):
    """Copy a unit, in the thread of ``by``, or in the spill thread; then tell it by ``moved`` or ``failed``.

    ``nbytes`` is what is set aside for it where it goes to, ``age`` the unit's when the copy was decided.
    """

    unit: Unit
    source: int
    to: int
    by: Ticket | Room | None
    nbytes: int
    age: int


class Drop(NamedTuple):
    """Give up what a place holds of a unit."""

    unit: Unit
    place: int


class Release(NamedTuple):
    """Give memory that is kept to be used again back to the system."""

    place: int


class Resume(NamedTuple):
    """Let a thread go on: its units are up, or room was made, and all drops before this one are done."""

    who: Ticket | Room


class Fail(NamedTuple):
    """Let a thread go on with an error; of an allocation None: nothing more can go."""

    who: Ticket | Room
    error: Exception | None


class Say(NamedTuple):
    """Tell people, in words of the executor's, that what is above its limit stays there, or moves again."""

    what: Literal["stays", "works again", "immovable"]
    place: int
    nbytes: int
    error: Exception | None


class Leave(NamedTuple):
    """Leave the cluster: a unit is lost, and those who wait for its key would wait for ever."""

    unit: Unit
    error: Exception


Instruction = Copy | Drop | Release | Resume | Fail | Say | Leave
