"""Carries out the state machine's instructions: the lock is held for the machine only, not for the work.

These threads make copies:

- A reader brings up the units that it needs, in :meth:`Executor.needing`.
- The spill thread copies down the units above a limit, and brings up units for the next tasks.
- A thread whose allocation fails copies down until there is room, in :meth:`Executor.evict`.

A copy goes to the inbox of its thread. A waiting thread makes the copies in its inbox meanwhile. So a copy down waits
for no other thread, even if pickling runs user code that reads from the store.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from hpcgpu.errors import SpillError, message_of
from hpcgpu.host.cuda_driver import lasting_error
from hpcgpu.model.settings import Limit
from hpcgpu.spill.devices.allocation_failure import attach, detach
from hpcgpu.spill.devices.copies import DriverCopies, is_lasting
from hpcgpu.spill.devices.device import Device
from hpcgpu.spill.state.history import STORY
from hpcgpu.spill.state.instructions import (
    DEVICE,
    DISK,
    HOST,
    Answer,
    Copy,
    Drop,
    FailedAllocation,
    Leave,
    Say,
    Ticket,
    Trim,
)
from hpcgpu.spill.state.machine import Instructions, SpillState
from hpcgpu.spill.storage.disk import Disk, ImmovableError, Stored
from hpcgpu.spill.storage.lock import LeafLock, ReenteredError, is_inside
from hpcgpu.spill.storage.pinned import CHUNK_BYTES
from hpcgpu.spill.store import inbox
from hpcgpu.spill.store.inbox import Count, Inbox, Todo, this_thread
from hpcgpu.spill.store.reports import Reports, copy_error, describe, forget_frames, tier_name
from hpcgpu.spill.values.unit import ABSENT, Content, Entry, ObjectContent

logger = logging.getLogger("distributed.worker.memory")


class Executor:
    """The only object that changes units: every event goes to the machine through it. Thread-safe.

    ``lock`` is a leaf: under it the machine is called and references change. A thread with an event makes a Todo, fills
    it by :meth:`record` under the lock, and carries it out without the lock. A limit of 0 bytes means no limit.
    """

    def __init__(self, device_limit: Limit, host_limit_bytes: int, disk: Disk) -> None:
        limits = {tier: n for tier, n in ((HOST, host_limit_bytes), (DISK, disk.segments.limit_bytes)) if n}
        self.lock = LeafLock()
        self.state, self.disk = SpillState(limits), disk
        self._device_limit, self._devices, self._sizes = device_limit, list[Device](), dict[Device, int]()
        self.contents: dict[Any, ObjectContent] = {}  # by the names of the allocations that they lie in now
        self.values: dict[int, Entry] = {}  # by the ids of values that are whole and have a name
        self.on_fault: Callable[[SpillError], None] | None = None  # called once, in the thread that copied up
        self.counters = {n: Count() for n in ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")}
        self.reports = Reports(self.state.stays)
        self.immovable: dict[int, int] = {}  # bytes of units that cannot be pickled, by their names
        # Entries whose handle or proxy is gone, and tickets of generators that are gone: the garbage collector may add
        # to it at any time. The spill thread reads the inbox, and frees the contents of the bins.
        self.orphans, self.inbox, self.bins = deque[Any](), Inbox(), list[Any]([disk])
        self.rescues, self.page_locked = 0, list[Any]()
        # whether to lock host memory ahead; after how many moves down that was asked for, -1: no device is half full
        self.wants_locks, self._moves_seen = False, -1
        self.closed = self.is_watched = self.wants_trim = self.has_excess = self._has_lost_gpu = False
        # device memory given up without a copy, by tier: kernels of finished tasks may still read it
        self._unread: list[tuple[int, list[Any]]] = []

    # --- devices ------------------------------------------------------------------------------------------------------
    def tier_of(self, device: Device) -> int:
        """Return the tier of a device; the first call sets its limit, and makes room when its allocations fail."""
        if self._sizes.get(device) == device.memory_bytes:  # no device leaves; a driver may know the size later
            return DEVICE + self._devices.index(device)
        with self.lock:
            if device not in self._devices:
                self._devices.append(device)
                self.bins += [device] if hasattr(device, "waste") else []
            self._sizes[device] = device.memory_bytes
            tier = DEVICE + self._devices.index(device)
            todo = Todo()
            if self._device_limit:
                self.record(self.state.limit(tier, self._device_limit.of_device(device.memory_bytes)), todo)
        self.carry_out(todo)
        # a simulated device has no page-locked memory
        self.page_locked = [each.copies for each in self._devices if hasattr(each, "copies")]
        for made in self.page_locked:
            if isinstance(made, DriverCopies) and (most := self.state.usage(HOST).limit):
                made.lock_at_most(most)
        if self._device_limit:
            attach(device, self)
        return tier

    @property
    def idle_bytes(self) -> int:
        """Host memory that is kept for reuse."""
        return self.disk.slabs.free_bytes + sum([memory.idle_bytes for memory in self.page_locked])

    def trim(self, nbytes: float = math.inf) -> int:
        """Give ``nbytes`` of it, or all, back to the system, which takes a moment; return its bytes."""
        freed = self.disk.slabs.trim(nbytes)
        for memory in self.page_locked:
            freed += memory.trim(nbytes - freed) if nbytes > freed else 0
        return freed

    def trim_excess(self) -> None:
        """Give back what has no room beside the data in host memory; in the spill thread."""
        self.has_excess, idle_bytes = False, self.idle_bytes
        with self.lock:
            excess = self.state.excess(idle_bytes)
        if excess > 0:
            self.trim(excess)

    def lock_ahead(self) -> None:
        """Lock a little host memory for the next moves from devices, unless data needs it; in the spill thread."""
        self.wants_locks, host = False, self.state.usage(HOST)
        if host.limit and host.total + self.idle_bytes + CHUNK_BYTES > host.limit:
            return
        for made in self.page_locked:
            if isinstance(made, DriverCopies) and made.lock_ahead():
                self.wants_locks = True
                self.wake()  # moves come first
        self.count_kept()

    def _look_ahead(self) -> None:
        """Ask for locked memory when a device gets half full, and when a move has used some."""
        devices = [self.state.usage(DEVICE + i) for i in range(len(self._devices))]
        moves = self.counters["device_to_host"].number if any(0 < d.limit <= 2 * d.total for d in devices) else -1
        if moves != self._moves_seen:
            self._moves_seen, self.wants_locks = moves, moves >= 0
            if self.wants_locks:
                self.wake()

    def count_kept(self) -> None:
        """Tell the machine what is kept for reuse, if that has changed."""
        if self.disk.slabs.is_empty and not self.page_locked:
            return  # each value that is set comes here
        if self.page_locked:
            self._look_ahead()
        if (idle_bytes := self.idle_bytes) != self.state.kept_bytes:
            self.report(self.state.kept, HOST, idle_bytes)

    def give_back(self, *, if_short: bool = False) -> None:
        """Free the device memory that libraries keep for reuse; ``if_short``: only if a device has little left."""
        for device in tuple(self._devices):
            device.give_back(if_short=if_short)

    def detach_devices(self) -> None:
        """Make no more room for allocations."""
        for device in self._devices:
            detach(device, self)

    # --- facts --------------------------------------------------------------------------------------------------------
    def tiers(self) -> dict[str, int]:
        """Return the bytes in each tier: each unit counts in its highest tier; copies under way are not counted."""
        todo = Todo()
        with self.lock:
            self._bury(todo)  # there may be no other event for long, or ever, once the store is closed
            sizes = {"device": 0, "host": 0, "disk": 0}
            for tier in range(DEVICE + len(self._devices)):
                now = self.state.usage(tier)
                sizes[tier_name(tier)] += now.total - now.copies - now.coming
        self.carry_out(todo)
        return sizes

    def history(self) -> tuple[str, ...]:
        """Return the last 1,000 events, or more, as lines of JSON."""
        with self.lock:
            return tuple(self.state.history.lines())

    # --- events -------------------------------------------------------------------------------------------------------
    def report(self, event: Callable[..., Instructions], *arguments: Any) -> None:
        """Report an event to the machine, and carry out its instructions."""
        todo = Todo()
        with self.lock:
            self.record(event(*arguments), todo)
        self.carry_out(todo)

    def name(self, entry: Entry) -> Instructions:
        """Give an entry one more key or handle; under the lock."""
        entry.names += 1
        if entry.names > 1:
            return self.state.used(entry.units)
        for unit in entry.units:
            unit.join(entry)
        for content in entry.small:
            self.state.join(content.bundle, content)
        return self.state.set(entry.units)

    def unname(self, entry: Entry, todo: Todo) -> None:
        """Take one key or handle from an entry; under the lock."""
        entry.names -= 1
        if not entry.names:
            for unit in entry.units:
                unit.leave(entry)
            self._forget_value(entry, todo.garbage)
            for content in entry.small:
                self._release_member(content, todo)
            self.record(self.state.delete(entry.units), todo)

    def _release_member(self, content: ObjectContent, todo: Todo) -> None:
        """Take one name from a member of a bundle, which it leaves with its last name; under the lock."""
        if out := self.state.leave(content.bundle, content):
            self.record(out, todo)
        if not content.keys:
            del content.bundle.members[content]
            self._forget_names(content)
            todo.garbage.append(content.take(HOST))
            if content.top != HOST:
                todo.garbage.append(content.take(content.top))

    def record(self, instructions: Instructions, todo: Todo) -> None:
        """Put instructions into a Todo; take the references of drops at once; under the lock."""
        each: Any
        for each in instructions:
            kind = type(each)
            if kind is Drop:
                garbage: list[Any] = [] if each.may_be_read else todo.garbage
                self._detach(each.unit, each.tier, todo, garbage)
                if each.may_be_read:
                    self._unread.append((each.tier, garbage))
            else:
                if kind is Copy and each.by is not None:
                    each.by.sent += 1
                todo.instructions = todo.instructions or deque()
                todo.instructions.append(each)

    def carry_out(self, todo: Todo) -> None:
        """Carry out a Todo; without the lock. If a step raises, later steps are made first."""
        while True:
            self._make_steps(todo)
            if not self.orphans:
                break
            with self.lock:
                self._bury(todo)
        if any([each.waste for each in self.bins]) or self._unread:  # a list: each event asks
            self.wake()

    def _make_steps(self, todo: Todo) -> None:
        try:
            while todo.released:
                todo.released.pop().release()
            todo.garbage.clear()  # memory is freed here
            while todo.instructions:
                self._perform(todo.instructions.popleft())
        except BaseException:  # a log filter that raises, Ctrl-C: others wait for the later copies and answers
            self._make_steps(todo)
            raise

    def wake(self) -> None:
        """Wake the spill thread, unless the store is closed."""
        if not self.closed:
            self.inbox.put(None)

    # --- waiting ------------------------------------------------------------------------------------------------------
    @contextmanager
    def needing(
        self, units: Iterable[Content], *, writes: bool = False, for_peer: bool = False, stays: bool = False
    ) -> Iterator[None]:
        """Keep units up while inside; this thread brings up those that are below, unless they only ``stay``.

        Raises an error of their copies: SpillError is for good; after another one the next try may succeed.
        """
        todo, is_urgent = Todo(), this_thread.copies_down > 0
        with self.lock:
            needed = tuple([unit for unit in units if unit.valid] if stays else units)
            ticket = Ticket(needed, writes, for_peer, stays, is_urgent, inbox=this_thread.inbox)
            self.record(self.state.need(ticket), todo)
        try:
            self.carry_out(todo)
            if not ticket.answered and is_inside():
                raise ReenteredError
            inbox.wait_for(ticket)
            if ticket.error is not None:
                raise copy_error(ticket.error)
            yield
        finally:
            ticket.error = None
            try:
                if self.lock.is_mine:  # the garbage collector ends a generator, in a thread that is inside the store
                    self.orphans.append(ticket)
                else:
                    self.report(self.state.release, ticket)
            finally:
                inbox.make_sent(ticket)

    @staticmethod
    def may_evict() -> bool:
        """Tell whether no move waits for this thread: it is no spill thread, makes no copy down, and has no lock."""
        return not (this_thread.spills or this_thread.copies_down or is_inside())

    def free_unread(self) -> bool:
        """Free device memory given up without a copy, after its kernels; return whether there was any."""
        unread = tuple(self._unread)
        for tier in {tier for tier, _ in unread}:
            self._devices[tier - DEVICE].synchronize()
        for _, garbage in unread:
            garbage.clear()  # memory is freed here, even if another thread is about to do the same
        if unread:
            with self.lock:
                self._unread = [each for each in self._unread if each[1]]
        return bool(unread)

    def evict(self, device: Device, nbytes: int) -> bool:
        """Copy down for a failed allocation, unless others wait for this thread; return whether memory became free."""
        if is_inside():
            return False
        if (was_freed := self.free_unread()) or not self.may_evict():
            return was_freed
        allocation = FailedAllocation(self.tier_of(device), max(nbytes, 1), inbox=this_thread.inbox)
        try:
            self.report(self.state.alloc_failed, allocation)
            inbox.wait_for(allocation)
        finally:
            if not allocation.answered:
                self.report(self.state.alloc_given_up, allocation)
            for copy in inbox.take_unmade(allocation):  # another thread has freed enough, or Ctrl-C
                self._send_to_spill_thread(copy)
        return self.free_unread() or allocation.error is None

    def count_rescue(self) -> None:
        """Count an allocation that has room now; in the thread that allocates."""
        with nullcontext() if self.lock.is_mine else self.lock:
            self.rescues += 1

    # --- copies -------------------------------------------------------------------------------------------------------
    def copy(self, copy: Copy) -> None:
        """Make a copy, in this thread, and report its end to the machine."""
        unit: Content = copy.unit  # type: ignore[assignment]
        is_down = copy.to < copy.source
        began_s = time.perf_counter()
        this_thread.copies_down += is_down
        is_reported, todo = False, Todo()
        try:
            data = unit.copied(copy.source, copy.to, self.disk)
            takes_bytes, moved_bytes = _sizes(copy, data)
            seconds = time.perf_counter() - began_s
            with self.lock:
                count = self.counters[f"{tier_name(copy.source)}_to_{tier_name(copy.to)}"]
                count.nbytes += moved_bytes or unit.nbytes
                count.number += 1
                count.seconds += seconds
                unit.put(copy.to, data)
                if copy.to == unit.top:
                    self.contents |= {name: content for content in unit.contents for name in content.names}
                is_reported = True
                self.record(self.state.moved(copy, takes_bytes), todo)
            del data
        except BaseException as e:
            if is_reported:
                self._ended(todo)
            else:
                self._failed(copy, e)
            if is_reported or not isinstance(e, Exception):
                raise
            return
        finally:
            this_thread.copies_down -= is_down
        self._ended(todo)

    def _failed(self, copy: Copy, error: BaseException) -> None:
        unit: Content = copy.unit  # type: ignore[assignment]
        is_down = copy.to < copy.source
        # a unit that cannot come up from host memory is still there: the reader gets the error, and may try again
        is_lost = copy.source == DISK and isinstance(error, OSError | SpillError)
        for_good = isinstance(error, ImmovableError) if is_down else is_lost and not isinstance(error, ReenteredError)
        if isinstance(error, Exception):
            forget_frames(error)  # they keep the unit, which keeps the error: no memory would be freed
        if for_good and not is_down:
            cause, error = error, SpillError(f"{describe(unit)} cannot be read back from disk: {message_of(error)}")
            error.__cause__ = cause
        if not isinstance(error, Exception):
            error = SpillError(f"a copy was interrupted: {type(error).__name__}")
        todo = Todo()
        with self.lock:
            if for_good and is_down and unit.keys:
                self.immovable[unit.name] = unit.nbytes
            self.record(self.state.failed(copy, error, for_good), todo)
        self.report_lost_gpu(error)
        self._ended(todo)

    def report_lost_gpu(self, error: BaseException) -> None:
        """Report to the owner, once, that this process cannot use its GPU after an error, also one of a task."""
        if self._has_lost_gpu:
            return
        text = message_of(error)
        if not is_lasting(error):
            if not (answer := lasting_error()):
                return
            text = f"the CUDA driver answers {answer} after {text}"
        self._has_lost_gpu = True
        self._perform(Leave(SpillError(f"the GPU cannot be used any more by this process: {text}")))

    def give_up(self, *copies: Copy) -> None:
        """Fail copies, since the store is closed."""
        for copy in copies:
            self._failed(copy, RuntimeError("the store is closed"))

    def _ended(self, todo: Todo) -> None:
        self.carry_out(todo)
        self.count_kept()
        if self.state.is_stuck or (self.is_watched and not self.state.moves):
            self.wake()

    def _detach(self, unit: Content, tier: int, todo: Todo, garbage: list[Any]) -> None:
        """Take a unit's data from a tier. No thread gets it from now on; threads that have it may use it further."""
        garbage.append(unit.take(tier))
        if tier == unit.top:
            for content in unit.contents:
                self._forget_names(content)
                if content.stored_objects:
                    living = filter(None, [ref() for ref in content.stored_objects.values()])
                    todo.released = [*todo.released, *living]
            for entry in unit.entries:
                if not entry.lazy or unit is entry.skeleton:
                    self._forget_value(entry, garbage)
            if self.immovable:
                self.immovable.pop(unit.name, None)

    def _forget_names(self, content: ObjectContent) -> None:
        for name in content.names:
            if self.contents.get(name) is content:
                del self.contents[name]
        if content.names:  # not an attribute of each content
            content.names = ()

    def _forget_value(self, entry: Entry, garbage: list[Any]) -> None:
        if (value := entry.value) is not ABSENT:
            garbage.append(value)
            if self.values.get(id(value)) is entry:
                del self.values[id(value)]
            entry.value = ABSENT

    def _bury(self, todo: Todo) -> None:
        while self.orphans:
            orphan = self.orphans.popleft()
            if isinstance(orphan, Entry):
                self.unname(orphan, todo)
            else:
                self.record(self.state.release(orphan), todo)

    # --- instructions -------------------------------------------------------------------------------------------------
    def _perform(self, instruction: Any) -> None:
        kind = type(instruction)
        if kind is Copy and instruction.by is not None:
            instruction.by.inbox.put((self, instruction))
        elif kind is Copy:
            self._send_to_spill_thread(instruction)
        elif kind is Answer:
            waiter = instruction.waiter
            waiter.error, waiter.answered = instruction.error, True
            if waiter.inbox is not this_thread.inbox:
                waiter.inbox.put(None)
        elif kind is Trim:
            if instruction.excess:
                self.has_excess = True
            else:
                self.wants_trim = True
            self.wake()
        elif kind is Say and not self.closed:
            self.reports.say(instruction)
        elif kind is Leave:
            for line in self.history():
                logger.info("%s %d: %s", STORY, os.getpid(), line)
            try:
                if (on_fault := self.on_fault) is not None:
                    on_fault(instruction.error)
            except Exception:  # the other instructions must be carried out
                logger.exception("this error could not be reported: %s", instruction.error)

    def _send_to_spill_thread(self, copy: Copy) -> None:
        self.inbox.put((self, copy))
        if self.closed:  # the spill thread may have read its inbox for the last time
            self.give_up(*inbox.drain(self.inbox))
            self.inbox.put(None)  # if it has not, it reads the inbox once more


def _sizes(copy: Copy, data: Any) -> tuple[int, int]:
    """Return the bytes that a copy's result takes in its tier, and the bytes moved; 0: the unit's size."""
    unit: Content = copy.unit  # type: ignore[assignment]
    if copy.to == DISK:
        stored: Stored = data[0]
        return sum([piece.nbytes for piece in stored.slot]), stored.nbytes
    up_bytes = unit.bytes_up(data) if copy.source == DISK else 0
    return up_bytes, up_bytes
