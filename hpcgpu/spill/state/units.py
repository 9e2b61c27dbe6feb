"""The nouns of the state machine: what moves, who waits, and what is to be done. All sizes are in bytes.

The machine changes Unit, Ticket and FailedAllocation, only under the store's lock. The instructions (Copy, Drop, Trim,
Resume, Fail, Say, Leave) are immutable: SpillState and its parts make them under that lock, and
:class:`hpcgpu.spill.store.executor.Executor` carries them out in the thread that told of the event; a Copy in the
thread that it names.
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
    """Bytes that move as one. There may be a million: usual values are in the class, and an object has the others.

    The store's units are :class:`hpcgpu.spill.values.unit.Content`, which also holds the data.

    Attributes
    ----------
    name : int
        A number that no other unit has.
    nbytes : int
        On the device or in host memory.
    top : int
        The tier in which it is used: a device, or HOST.
    at : int
        The tier that it lies in when the first key names it.
    disk_bytes : int
        Its size on disk, once that is known; 0: ``nbytes``.
    valid : int
        The tiers that hold its present contents, as bits: ``1 << tier``. 0: no key names it.
    tier : int
        The highest of them; -1: none.
    keys, pins : int
        The number of keys that name it, and of tickets that need it.
    age : int
        The time of its last use; smaller is longer ago.
    move : int or None
        The tier to which the copy under way goes; the copy comes from ``tier``.
    dirty : bool
        Code outside of a task has the object and may write to it at any time: a copy below is worth nothing.
    fixed : bool
        It can never be copied down (it cannot be pickled).
    lost : Exception or None
        Why it cannot be read back.
    waiters : tuple of Ticket
        The tickets that wait for it.
    waiting : dict or None
        Priorities of the ready tasks that need it, by task.
    running : int
        The number of running tasks that need it.

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
        """Whether it has a valid copy below its tier."""
        return self.valid & (self.valid - 1) != 0

    def size(self, tier: int) -> int:
        """Return its size in a tier."""
        return self.disk_bytes or self.nbytes if tier == DISK else self.nbytes


@dataclass(slots=True, eq=False)
class Ticket:
    """A need for units: they are pinned until the ticket is released, whatever happens.

    Executor makes it, as :class:`hpcgpu.spill.store.inbox.ThreadTicket`, in the thread that reads.

    Attributes
    ----------
    units : tuple of Unit
        Each once.
    writes : bool
        The reader may keep them and write to them: an actor, a client in a task, the write to a proxy.
    for_peer : bool
        Host bytes suffice: they are sent to another worker, and nothing goes through the device.
    stays : bool
        Nothing comes up: the units only go no further down.
    at_once : bool
        It does not wait for room: it comes from within a copy down, and others may wait for that copy.
    missing : int
        The number of units that are not up.
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
        """Tell whether a unit is below the tier in which this ticket needs it."""
        return not self.stays and unit.tier < (HOST if self.for_peer else unit.top)


@dataclass(slots=True, eq=False)
class FailedAllocation:
    """An allocation that has failed: its thread waits until so many bytes of a device are freed.

    ``had_bytes`` is the count of freed bytes at its beginning, ``until_bytes`` the count at which it has room.
    Executor makes it, as :class:`hpcgpu.spill.store.inbox.ThreadAllocation`, in that thread.
    """

    tier: int
    nbytes: int
    until_bytes: int = 0
    had_bytes: int = 0


Waiter = Ticket | FailedAllocation


class Copy(NamedTuple):
    """Copy a unit, in the thread of ``by``, or in the spill thread; then report it by ``moved`` or ``failed``.

    ``nbytes`` are set aside for it in its new tier; ``age`` is the unit's at the decision to copy.
    """

    unit: Unit
    source: int
    to: int
    by: Waiter | None
    nbytes: int
    age: int


class Drop(NamedTuple):
    """Give up what a tier holds of a unit; ``may_be_read``: kernels of tasks that are over may still read it there."""

    unit: Unit
    tier: int
    may_be_read: bool = False


class Trim(NamedTuple):
    """Give memory that a tier keeps to be used again back to the system."""

    tier: int


class Resume(NamedTuple):
    """Let a thread go on: its units are up, or it has room, and all drops before this instruction are done."""

    waiter: Waiter


class Fail(NamedTuple):
    """Let a thread go on with an error; for an allocation None: nothing more can go."""

    waiter: Waiter
    error: Exception | None


class Say(NamedTuple):
    """Log that a tier stays above its limit, or is no longer above it, or that a unit is immovable."""

    what: Literal["stays", "fits", "immovable"]
    tier: int
    nbytes: int
    error: Exception | None


class Leave(NamedTuple):
    """Leave the cluster: a unit is lost, and others would wait for its key for ever; None: the GPU is lost."""

    unit: Unit | None
    error: Exception


Instruction = Copy | Drop | Trim | Resume | Fail | Say | Leave
