"""Handles for the event loop, packed values for a peer; inboxes of threads, and lines of the log.

A worker must neither copy on its event loop nor show handles to user code. So it

- reads its data for a task, and for ``get_data``, inside ``store.handing_out_handles(...)``;
- enters ``store.using(keys)`` in the task's thread, and replaces handles by the values that :meth:`Handle.resolve`
  returns;
- sends, in place of a handle, the value, or a call of :func:`arrive` with the packed value;
- calls :func:`keep_packed` and :func:`hpcgpu.spill.store.messages.register` when it starts;
- sets ``store.on_fault``, and calls ``store.close()`` at its end.

``hpcgpu.deploy.processes.worker_plugin`` does all this. Without it the store returns values everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.errors import SpillError, message_of
from hpcgpu.spill.devices import Device
from hpcgpu.spill.state import DISK, HOST, Copy, FailedAllocation, Say, Ticket, Waiter
from hpcgpu.spill.values import Skeleton, Slot, put_together
from hpcgpu.spill.values.unit import ABSENT, Content, Entry
from hpcgpu.units import format_bytes

# Takes pairs of executor and copy; None wakes the thread. Several stores use a thread's inbox.
Inbox = SimpleQueue[Any]


class _ThisThread(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()  # takes its copies
        self.copies_down = 0  # the number of copies down that it is making
        self.spills = False  # it is the spill thread of a store


this_thread = _ThisThread()


def drain(inbox: Inbox) -> Iterator[Copy]:
    """Take the copies out of an inbox, without waiting."""
    with contextlib.suppress(Empty):
        while True:
            if (item := inbox.get_nowait()) is not None:
                yield item[1]


@dataclass(slots=True)
class Count:
    """Moves in one direction and their seconds; changed under the store's lock, read without it."""

    nbytes: int = 0
    number: int = 0
    seconds: float = 0.0


class Todo:
    """The work of a thread after an event, without the lock: it frees memory, then carries out instructions."""

    __slots__ = ("garbage", "instructions", "released")

    def __init__(self) -> None:
        self.garbage: list[Any] = []
        self.released: list[Any] | tuple[()] = ()  # StoredObjects
        self.instructions: deque[Any] | tuple[()] = ()


def wait_for(waiter: Waiter) -> None:
    """Make the copies in the inbox until ``waiter`` is answered; while it waits for room, copies up wait, too."""
    aside = []
    try:
        while not waiter.answered:
            if (item := this_thread.inbox.get()) is None:
                continue
            if type(waiter) is FailedAllocation and item[1].to > item[1].source:
                aside.append(item)
            else:
                _make(item)
    finally:
        for item in aside:
            this_thread.inbox.put(item)


def make_sent(ticket: Ticket) -> None:
    """Make the copies of a ticket that is over: other threads may wait for them, too."""
    try:
        while ticket.taken < ticket.sent:
            if (item := this_thread.inbox.get()) is not None:
                _make(item)
    except BaseException:  # Ctrl-C in one of them
        make_sent(ticket)
        raise


def take_unmade(allocation: FailedAllocation) -> list[Copy]:
    """Take out the copies of an allocation that is over: this thread may never read its inbox again."""
    copies, others = [], []
    while allocation.taken < allocation.sent:
        item = this_thread.inbox.get()
        if item is not None and item[1].by is allocation:
            allocation.taken += 1
            copies.append(item[1])
        elif item is not None:
            others.append(item)
    for item in others:
        this_thread.inbox.put(item)
    return copies


def _make(item: tuple[Any, Copy]) -> None:
    executor, copy = item
    if copy.by is not None:
        copy.by.taken += 1
    executor.copy(copy)


logger = logging.getLogger("distributed.worker.memory")

TIER_NAMES = {DISK: "disk", HOST: "host"}
# While copies fail, a tier may be above its limit and below it by turns, each second: one line a minute.
_AGAIN_S = 60.0
_DOWN = ("device_to_host", "host_to_disk")


class Reports:
    """Logs tiers that stay above their limits, and values that cannot move. Thread-safe, without the store's lock."""

    # as text: distributed's DequeHandler (2026.8.0) keeps 10,000 records, and an error keeps the arrays of its frames
    # two threads may call in another order than that of the instructions: ``stays`` has the present state

    def __init__(self, stays: Collection[int]) -> None:
        self._stays = stays
        self.trouble: dict[int, str] = {}  # by tier, why it stays above its limit, in one line
        self._last: dict[int, tuple[str, float]] = {}  # by tier, the last line, and its time
        self._unanswered: set[int] = set()  # tiers that were logged as above their limit, and not as below it since
        self._immovable_kinds: set[str] = set()

    def say(self, say: Say) -> None:
        """Log an event, unless it was logged before."""
        if say.event == "immovable":
            kind = getattr(say.error, "kind", "value")
            if say.error is not None and kind not in self._immovable_kinds:
                self._immovable_kinds.add(kind)
                verb = "pickled; such values stay in memory" if say.tier == HOST else "moved; such arrays stay there"
                logger.warning("a %s cannot be %s: %s", kind, verb, message_of(say.error))
        elif say.event == "stays":
            self._say_stays(say)
        elif say.tier not in self._stays:
            self.trouble.pop(say.tier, None)
            if say.tier in self._unanswered:
                self._unanswered.discard(say.tier)
                logger.info("the %s tier is below its limit again", tier_name(say.tier))

    def _say_stays(self, say: Say) -> None:
        why = "the files on disk have reached their limit (max_spill)"
        if (error := say.error) is not None:
            why = message_of(error) or type(error).__name__
        if say.tier in self._stays:
            self.trouble[say.tier] = why
        last, last_s = self._last.get(say.tier, ("", 0.0))
        if why == last and time.monotonic() - last_s < _AGAIN_S:
            return
        self._last[say.tier] = why, time.monotonic()
        self._unanswered.add(say.tier)
        size, name = format_bytes(say.nbytes), tier_name(say.tier)
        logger.warning("%s stay in the %s tier, since they cannot be moved down: %s", size, name, why)


def tier_name(tier: int) -> str:
    """Return the name of a tier in messages."""
    return TIER_NAMES.get(tier, "device")


def describe(unit: Content) -> str:
    """Return the keys of the values that a lost unit is a part of, for a message."""
    keys = [repr(entry.key) for entry in tuple(unit.entries) if entry.key is not ABSENT]
    kind = unit.contents[0].kind_of(0).__name__ if unit.contents else "value"
    return f"the value of {', '.join(keys) or f'a {kind}'}"


class SpillLog:
    """Lines about spilling, for the spill thread: when it begins, and ``quiet_s`` after the last move down."""

    def __init__(self, quiet_s: float = 10.0) -> None:
        self.quiet_s = quiet_s
        self._now = self._before = dict.fromkeys(_DOWN, (0, 0))  # bytes and number of moves: last, and at the beginning
        self._since_s: float | None = None  # the beginning; None: no move is recent
        self._last_s = 0.0

    def note(self, tiers: Mapping[str, int], counters: Mapping[str, Count], now_s: float) -> str | None:
        """Take the store's bytes and moves, after a move or :meth:`wait_s`; return a line for the log, or None."""
        before, self._now = self._now, {way: (counters[way].nbytes, counters[way].number) for way in _DOWN}
        if self._now != before:
            self._last_s = now_s
            if self._since_s is not None:
                return None
            self._since_s, self._before, event = now_s, before, "begins"
        elif self._since_s is not None and now_s - self._last_s >= self.quiet_s:
            event, self._since_s = f"has ended after {self._last_s - self._since_s:.0f} s", None
        else:
            return None
        moves = []
        for way in _DOWN:
            nbytes, number = (b - a for a, b in zip(self._before[way], self._now[way], strict=True))
            if number:
                moves.append(f"{way.replace('_', ' ')} {format_bytes(nbytes)} in {number} move{'s' * (number > 1)}")
        sizes = ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in tiers.items())
        return f"spilling {event}: {', '.join(moves)}; now {sizes}"

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until :meth:`note` must be called even if there is no move; None: never."""
        return None if self._since_s is None else max(0.0, self._last_s + self.quiet_s - now_s)


def forget_frames(error: BaseException) -> None:
    """Remove the tracebacks of an error, and of the errors that led to it: their frames keep arrays."""
    seen: dict[int, None] = {}
    rest: list[BaseException | None] = [error]
    while rest:
        if (each := rest.pop()) is not None and id(each) not in seen:
            seen[id(each)] = None
            each.__traceback__ = None
            rest += [each.__cause__, each.__context__]


def copy_error(error: Exception) -> Exception:
    """Return a copy of an error for one of its readers, since raising adds frames; a SpillError if no copy is equal."""
    try:
        made = copy.copy(error)
        is_equal = type(made) is type(error) and made is not error and str(made) == str(error)
    except Exception:  # classes of users
        is_equal = False
    if not is_equal:
        made = SpillError(f"a value cannot be read now: {error!r}")
        made.__cause__ = error
    elif error.__cause__ is not None:  # to set None would hide the context of the reader
        made.__cause__ = error.__cause__
    return made


class ReadMode(NamedTuple):
    """Readers in a context get handles. Immutable; GpuSpillBuffer makes it."""

    to_worker: bool  # the values are sent to a worker
    leaving: bool = False  # also for values that are up, but must be read in a thread to be sent


_mode: ContextVar[ReadMode | None] = ContextVar("hpcgpu-read-mode", default=None)
# Returns the read mode of this context; None: readers get values. Each read calls it, so it is no function in Python.
read_mode = _mode.get


@contextmanager
def reading(mode: ReadMode | None) -> Iterator[None]:
    """Set the read mode while inside."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


class Handle:
    """A stored value, to be resolved in a thread that may wait: a name of its entry, so the value lives as long."""

    __slots__ = ("entry", "reader")

    def __init__(self, reader: Any, entry: Entry) -> None:
        self.reader, self.entry = reader, entry  # a hpcgpu.spill.store.identity_map.Reader

    def __del__(self) -> None:
        self.reader.orphans.append(self.entry)  # no lock: the garbage collector may run this in a thread that holds it

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.entry.nbytes

    def resolve(self) -> Any:
        """Bring the value up, and return it; waits for copies."""
        return self.reader.restore(self.entry)

    def packed(self) -> Packed:
        """Return the value's bytes for a peer; no copy goes through the device; waits for copies."""
        return self.reader.packed(self.entry)

    def __reduce__(self) -> tuple[Callable[[Packed], Any], tuple[Packed]]:
        return Packed.unpack, (self.packed(),)


@dataclass(frozen=True, slots=True)
class Packed:
    """A value whose device buffers are host bytes, never written to: some are the store's own."""

    skeleton: Any  # the value with slots in place of its parts
    # for each slot: the index of the buffer and of its array, or None and the index in ``hosts``; and the part's type
    locations: tuple[tuple[int | None, int, type], ...]
    # of each buffer: its device (in another process: the device there), and the result of the device's ``pack``
    buffers: tuple[tuple[Device, np.ndarray, list[Any]], ...]
    hosts: tuple[Any, ...] = ()  # parts that are used in host memory

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(root.nbytes for _, root, _ in self.buffers)

    @property
    def kind(self) -> type:
        """The type of the value."""
        if isinstance(self.skeleton, Skeleton):
            return self.skeleton.nodes[-1].kind
        return self.locations[0][2] if isinstance(self.skeleton, Slot) else type(self.skeleton)

    def unpack(self) -> Any:
        """Return the value, with its arrays on this process's device."""
        arrays = [device.unpack(root, views) for device, root, views in self.buffers]
        return put_together(self.skeleton, [self.hosts[i] if b is None else arrays[b][i] for b, i, _ in self.locations])


_keep = False


def keep_packed() -> None:
    """Let values from peers stay in host memory until their first use: the workers of this process have this store."""
    global _keep  # noqa: PLW0603 - unpickling has no other way to know where it runs
    _keep = True


def arrive(packed: Packed) -> Any:
    """Return a value from a peer, where it arrives: packed for this process's store, or unpacked in another process."""
    return packed if _keep else packed.unpack()
