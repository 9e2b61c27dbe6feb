"""Carries out what the store's state machine says: one lock for the machine alone, and everything else outside of it.

Who copies what, and in which thread:

- A reader brings up what it needs in its own thread, in :meth:`Executor.needing`.
- The spill thread copies down what is above a limit, and brings up what the next tasks need.
- A thread whose allocation fails copies down what it needs room for, in :meth:`Executor.evict`.

A copy comes into the inbox of its thread. A thread that waits works its inbox off meanwhile, so that a copy down waits
for nobody, also where pickling runs user code that reads from the store itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from hpcgpu.errors import SpillError
from hpcgpu.model.limit import Limit
from hpcgpu.spill.devices import pressure
from hpcgpu.spill.devices.protocols import Device
from hpcgpu.spill.state.machine import Instructions, SpillState
from hpcgpu.spill.state.units import DEVICE, DISK, HOST, Copy, Drop, Fail, Leave, Release, Resume, Say
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.storage.pickled import ImmovableError
from hpcgpu.spill.store.inbox import Allocation, Inbox, Reader, here, there_now
from hpcgpu.spill.values.entry import ABSENT, Entry
from hpcgpu.spill.values.unit import Content, Lent, Whole
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.worker.memory")

_TIERS = {DISK: "disk", HOST: "host"}


@dataclass(slots=True)
class Count:
    """Moves in one direction, and the seconds that they took; changed under the store's lock, and read without."""

    nbytes: int = 0
    number: int = 0
    seconds: float = 0.0


class Todo:
    """What one thread is to do after an event, without the lock: give up memory first, then the rest in its order."""

    __slots__ = ("garbage", "parts", "said")

    def __init__(self) -> None:
        self.garbage: list[Any] = []
        self.parts: list[Lent] = []
        self.said: list[Any] = []


class Executor:
    """The one place where units change: every event goes to the machine through it.

    Thread-safe; GpuSpillBuffer makes it. ``lock`` is a leaf: who holds it calls the machine, changes references, and
    nothing else. Who tells of an event makes a Todo, fills it by :meth:`note`, and lets go of the lock to carry it out.

    Parameters
    ----------
    device_limit : Limit
        Where moving from a device begins.
    host_limit_bytes, disk_limit_bytes : int
        Of the host tier, and of the disk tier; 0: none.
    disk : Disk
        The disk tier, and room in host memory.

    Attributes
    ----------
    known : dict
        Units by the names of the allocations that they lie in just now.
    values : dict of int to Entry
        Entries by the ids of their values, of those that are whole and have a name.
    on_fault : callable or None
        Called with the SpillError when a value cannot be read back, once; in the thread that tried to copy it up.
    counters : dict of str to Count
        The moves so far, by direction.
    trouble : dict of int to str
        Why what is above the limit of a place stays there, in one line.
    kept : dict of int to int
        Bytes of the units that cannot be pickled, by their names.
    orphans : deque
        Entries and tokens whose handle or proxy is gone; the garbage collector may add to it at any time.
    inbox : SimpleQueue
        The spill thread's.
    rescues : int
        How many allocations went well after room was made.

    """

    def __init__(self, device_limit: Limit, host_limit_bytes: int, disk: Disk, disk_limit_bytes: int = 0) -> None:
        limits = {place: n for place, n in ((HOST, host_limit_bytes), (DISK, disk_limit_bytes)) if n}
        self.lock = threading.Lock()
        self.state, self.disk = SpillState(limits), disk
        self._device_limit, self._devices = device_limit, list[Device]()
        self.known: dict[Any, Content] = {}
        self.values: dict[int, Entry] = {}
        self.on_fault: Callable[[SpillError], None] | None = None
        self.counters = {n: Count() for n in ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")}
        self.trouble: dict[int, str] = {}
        self.kept: dict[int, int] = {}
        self.orphans: deque[Any] = deque()
        self.inbox: Inbox = SimpleQueue()
        self.under_way = 0
        self._coming: dict[int, int] = {}
        self.closed = self.is_watched = self.wants_trim = False
        self.rescues = 0
        self._immovable: set[str] = set()

    # --- devices ------------------------------------------------------------------------------------------------------
    def place_of(self, device: Device) -> int:
        """Return the place of a device; the first time its limit is set, and allocations that fail there ask us."""
        try:
            return DEVICE + self._devices.index(device)
        except ValueError:
            pass
        with self.lock:
            if device not in self._devices:
                self._devices.append(device)
            place = DEVICE + self._devices.index(device)
            todo = Todo()
            if self._device_limit:
                self.note(self.state.limit(place, self._device_limit.of_device(device.memory_bytes)), todo)
        self.carry_out(todo)
        if self._device_limit:
            pressure.join(device, self)
        return place

    @property
    def device_limit_bytes(self) -> int:
        """The limit of the first device, which is the worker's; 0: none, or not known yet."""
        return self.state.tiers.limits.get(DEVICE, 0)

    def page_locked(self) -> list[Any]:
        """Return what copies from and to the devices go through; a simulated one has nothing of its own."""
        return [device.copies for device in self._devices if hasattr(device, "copies")]

    def leave_devices(self) -> None:
        """Make room no more where allocations fail."""
        for device in self._devices:
            pressure.leave(device, self)

    # --- facts --------------------------------------------------------------------------------------------------------
    def tiers(self) -> dict[str, int]:
        """Return the bytes in each tier: of each unit where it lies; copies below and under way are not counted."""
        todo = Todo()
        with self.lock:
            self._bury(todo)  # perhaps nothing else happens for long, or ever: the store is closed
            found = {"device": 0, "host": 0, "disk": 0}
            for place, nbytes in self.state.tiers.bytes.items():
                copies = self.state.tiers.copy_bytes.get(place, 0) + self._coming.get(place, 0)
                found[_TIERS.get(place, "device")] += nbytes - copies
        self.carry_out(todo)
        return found

    @property
    def copy_bytes(self) -> int:
        """Bytes of clean copies in host memory, of what is in use on a device."""
        return self.state.tiers.copy_bytes[HOST]

    # --- events -------------------------------------------------------------------------------------------------------
    def tell(self, event: Callable[..., Instructions], *arguments: Any) -> None:  # noqa: ANN401
        """Tell the machine of an event, and carry out what it says."""
        todo = Todo()
        with self.lock:
            self.note(event(*arguments), todo)
        self.carry_out(todo)

    def name(self, entry: Entry) -> Instructions:
        """Let one more key or handle name an entry; under the lock."""
        entry.names += 1
        if entry.names > 1:
            return self.state.used(entry.units)
        for unit in entry.units:
            unit.join(entry)
        for content in entry.small:
            self.state.join(content.bundle, content)
        return self.state.set(entry, entry.units)

    def unname(self, entry: Entry, todo: Todo) -> None:
        """Let one key or handle less name an entry; under the lock."""
        entry.names -= 1
        if not entry.names:
            for unit in entry.units:
                unit.leave(entry)
            self._forget_value(entry, todo)
            for content in entry.small:
                self._release(content, todo)
            self.note(self.state.delete(entry), todo)

    def _release(self, content: Content, todo: Todo) -> None:
        """Let one less have a part that may be in a bundle, which it leaves with the last; under the lock."""
        if (bundle := content.bundle) is not None:
            self.note(self.state.leave(bundle, content), todo)
            if not content.keys:
                bundle.remove(content)
                self._forget_names(content)
                todo.garbage += [content.take(place) for place in {HOST, content.top}]

    def note(self, instructions: Instructions, todo: Todo) -> None:
        """Take note of instructions; under the lock."""
        for said in instructions:
            kind = type(said)
            if kind is Drop:
                self._detach(said.unit, said.place, todo)  # type: ignore[union-attr, arg-type]
            else:
                if kind is Copy:
                    self.under_way += 1
                    self._coming[said.to] = self._coming.get(said.to, 0) + said.nbytes  # type: ignore[union-attr]
                    if said.by is not None:  # type: ignore[union-attr]
                        said.by.sent += 1  # type: ignore[union-attr]
                todo.said.append(said)

    def carry_out(self, todo: Todo) -> None:
        """Carry out what was noted; without the lock."""
        while True:
            for part in todo.parts:
                part.let_go()
            todo.parts.clear()
            todo.garbage.clear()  # memory is freed here
            said, todo.said = todo.said, []
            for instruction in said:
                self._do_as_said(instruction)
            if not self.orphans:
                break
            with self.lock:
                self._bury(todo)
        if self.disk.has_waste:
            self.inbox.put(None)

    # --- waiting ------------------------------------------------------------------------------------------------------
    @contextmanager
    def needing(
        self, units: Iterable[Content], *, writes: bool = False, for_peer: bool = False, stays: bool = False
    ) -> Iterator[None]:
        """Keep units where they can be used while inside; this thread brings up what is below.

        Parameters
        ----------
        units : iterable of Content
            Each is named, or pinned by somebody.
        writes, for_peer, stays : bool
            As of a :class:`hpcgpu.spill.state.units.Ticket`.

        Raises
        ------
        SpillError
            A unit cannot be read back, ever.
        Exception
            Whatever a device raised: there may be room, or memory, at the next try.

        """
        ticket = self.reader(units, writes=writes, for_peer=for_peer, stays=stays)
        todo = Todo()
        with self.lock:
            self.note(self.state.need(ticket), todo)
        with self.served(ticket, todo):
            yield

    @contextmanager
    def pinning(self, units: Iterable[Content]) -> Iterator[None]:
        """Let units that are there go no further down while inside; nothing comes up for it."""
        todo = Todo()
        with self.lock:
            ticket = self.reader([unit for unit in units if unit.valid], stays=True)
            self.note(self.state.need(ticket), todo)
        with self.served(ticket, todo):
            yield

    @staticmethod
    def reader(units: Iterable[Content], writes: bool = False, for_peer: bool = False, stays: bool = False) -> Reader:
        """Return a ticket of this thread."""
        return Reader(tuple(units), writes, for_peer, stays, here.copies_down > 0, inbox=here.inbox)

    @contextmanager
    def served(self, ticket: Reader, todo: Todo) -> Iterator[None]:
        """Wait until the units of a ticket are up, and give it back at the end."""
        try:
            self.carry_out(todo)
            self._wait(ticket)
            if ticket.error is not None:
                raise ticket.error.with_traceback(None)
            yield
        finally:
            ticket.error = None  # its traceback has this frame: what the caller has would stay, too, until the next gc
            self.tell(self.state.release, ticket)
            while ticket.taken < ticket.sent:  # somebody else may wait for them, too
                self._take(ticket)

    def evict(self, device: Device, nbytes: int) -> bool:
        """Copy down from a device for an allocation that has failed, in its thread; return whether anything went.

        Never in a thread that others wait for: the spill thread, or one that copies down.
        """
        if here.spills or here.copies_down:
            return False
        room = Allocation(self.place_of(device), max(nbytes, 1), inbox=here.inbox)
        self.tell(self.state.alloc_failed, room)
        self._wait(room)
        return room.has_room

    def _wait(self, who: Reader | Allocation) -> None:
        """Work the inbox off until ``who`` is told; what comes up must wait where room is made."""
        aside = []
        while not who.told:
            got = here.inbox.get()
            if got is None:
                continue
            if type(who) is Allocation and got[1].to > got[1].source:
                aside.append(got)
            else:
                self._do_taken(got)
        for got in aside:
            here.inbox.put(got)

    def _take(self, ticket: Reader) -> None:
        if (got := here.inbox.get()) is not None:
            self._do_taken(got)

    @staticmethod
    def _do_taken(got: tuple[Executor, Copy]) -> None:
        executor, copy = got
        if copy.by is not None:
            copy.by.taken += 1  # type: ignore[union-attr]
        executor.copy(copy)

    # --- copies -------------------------------------------------------------------------------------------------------
    def copy(self, copy: Copy) -> None:
        """Make a copy, in this thread, and tell the machine how it went."""
        unit: Content = copy.unit  # type: ignore[assignment]
        is_down = copy.to < copy.source
        began_s = time.perf_counter()
        here.copies_down += is_down
        try:
            data = unit.copied(copy.source, copy.to, self.disk)
        except BaseException as e:
            self._failed(copy, e)
            if not isinstance(e, Exception):
                raise
            return
        finally:
            here.copies_down -= is_down
        takes_bytes = moved_bytes = unit.bytes_up(data) if copy.source == DISK else 0
        if copy.to == DISK:
            stored = unit.stored(data)
            takes_bytes, moved_bytes = stored.room_bytes, stored.nbytes
            del stored
        todo = Todo()
        with self.lock:
            self._end(copy)
            self._count(copy, time.perf_counter() - began_s, moved_bytes)
            self._attach(unit, copy.to, data)
            self.note(self.state.moved(copy, takes_bytes), todo)
        del data
        self._ended(todo)

    def _failed(self, copy: Copy, error: BaseException) -> None:
        unit: Content = copy.unit  # type: ignore[assignment]
        is_down = copy.to < copy.source
        for_good = isinstance(error, ImmovableError if is_down else OSError | SpillError)
        if isinstance(error, Exception):
            error.__traceback__ = None  # its frames have the unit, which keeps the error: nothing would be freed
        if for_good and not is_down:
            cause, error = error, SpillError(f"the value of {_keys_of(unit)} cannot be read back from disk: {error}")
            error.__cause__ = cause
        todo = Todo()
        with self.lock:
            self._end(copy)
            if for_good and is_down and unit.keys:
                self.kept[unit.name] = unit.nbytes
            told = error if isinstance(error, Exception) else SpillError(f"a copy was broken off: {error!r}")
            self.note(self.state.failed(copy, told, for_good), todo)
        self._ended(todo)

    def give_up(self, *copies: Copy) -> None:
        """Make these copies no more, since the store is closed."""
        for copy in copies:
            self._failed(copy, RuntimeError("the store is closed"))

    def _end(self, copy: Copy) -> None:
        self.under_way -= 1
        self._coming[copy.to] -= copy.nbytes

    def _ended(self, todo: Todo) -> None:
        self.carry_out(todo)
        if self.state.is_stuck or (self.is_watched and not self.under_way):
            self.inbox.put(None)

    def _count(self, copy: Copy, seconds: float, nbytes: int) -> None:
        ways = _TIERS.get(copy.source, "device"), _TIERS.get(copy.to, "device")
        count = self.counters["_to_".join(ways)]
        count.nbytes += nbytes or copy.unit.nbytes
        count.number += 1
        count.seconds += seconds

    def _attach(self, unit: Content, place: int, data: Any) -> None:  # noqa: ANN401
        unit.put(place, data)
        if place == unit.top:
            self.known |= {name: content for content in unit.contents for name in content.names}

    def _detach(self, unit: Content, place: int, todo: Todo) -> None:
        """Let go of what a place holds. From now on nobody gets it; who has it may go on."""
        todo.garbage.append(unit.take(place))
        if place == unit.top:
            for content in unit.contents:
                self._forget_names(content)
                todo.parts += content.living_parts()
            for entry in unit.entries:
                if not entry.lazy or unit is entry.rest:
                    self._forget_value(entry, todo)
            self.kept.pop(unit.name, None)

    def _forget_names(self, content: Content) -> None:
        for name in content.names:
            if self.known.get(name) is content:
                del self.known[name]
        content.names = ()

    def _forget_value(self, entry: Whole, todo: Todo) -> None:
        if (value := entry.value) is not ABSENT:
            todo.garbage.append(value)
            if self.values.get(id(value)) is entry:
                del self.values[id(value)]
            entry.value = ABSENT

    def _bury(self, todo: Todo) -> None:
        while self.orphans:
            orphan = self.orphans.popleft()
            if isinstance(orphan, Entry):
                self.unname(orphan, todo)
            elif orphan in self.state.keys:  # else it was never named
                self._release(orphan.content, todo)
                self.note(self.state.delete(orphan), todo)

    # --- instructions -------------------------------------------------------------------------------------------------
    def _do_as_said(self, said: Any) -> None:  # noqa: ANN401
        kind = type(said)
        if kind is Copy:
            self._send(said)
        elif kind is Resume or kind is Fail:
            who = said.who
            if kind is Fail:
                who.error = said.error
            elif type(who) is Allocation:
                who.has_room = True
            who.told = True
            if who.inbox is not here.inbox:
                who.inbox.put(None)
        elif kind is Release:
            self.wants_trim = True
            self.inbox.put(None)
        elif kind is Say and not self.closed:
            self._say(said)
        elif kind is Leave and (on_fault := self.on_fault) is not None:
            try:
                on_fault(said.error)
            except Exception:  # whatever it does: what else was said must be done
                logger.exception("nobody could be told that %s", said.error)

    def _send(self, copy: Copy) -> None:
        (copy.by or self).inbox.put((self, copy))  # type: ignore[union-attr]
        if copy.by is None and self.closed:  # the spill thread may have looked for the last time
            self.give_up(*there_now(self.inbox))
            self.inbox.put(None)  # it is to look if it has not

    def _say(self, said: Say) -> None:
        tier = _TIERS.get(said.place, "device")
        if said.what == "works again":
            self.trouble.pop(said.place, None)
            logger.info("moving down from the %s tier works again", tier)
        elif said.what == "immovable":
            kind = getattr(said.error, "kind", "value")
            if kind not in self._immovable:
                self._immovable.add(kind)
                what = "pickled; such values stay in memory" if said.place == HOST else "moved; such arrays stay there"
                logger.warning("a %s cannot be %s: %s", kind, what, said.error)
        else:
            why = said.error or "as much lies on disk as may (max_spill)"
            self.trouble[said.place] = str(why) or repr(why)
            logger.warning(
                "%s stay in the %s tier, since they cannot be moved down: %s", format_bytes(said.nbytes), tier, why
            )


def _keys_of(unit: Content) -> str:
    """Return how to call a unit that is lost: by the keys of the values that it is a part of."""
    keys = [repr(entry.key) for entry in tuple(unit.entries) if entry.key is not ABSENT]
    return ", ".join(keys) or f"a {unit.kind_of(0).__name__}"
