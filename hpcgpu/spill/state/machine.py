"""The state machine of the spill store: the tier of every unit and the moves under way; events in, instructions out.

The executor (:mod:`hpcgpu.spill.store.executor`) calls each method under the store's lock, and gives up the references
of drops under that lock, too. It carries out the other instructions in their order, without the lock.

These laws hold. The tests (``spill_worlds.py``) check the first seven in each state, all ten in those of small stores.

1. The bytes of a tier are the bytes that are valid there, and the bytes under way to it.
2. A named unit is valid in at least one tier at every moment.
3. A unit has at most one copy under way.
4. A copy goes from the highest valid tier to the next tier, up or down. The source stays valid until the copy ends.
5. A dirty unit is valid in one tier only: the tier in which it is used.
6. A pinned unit starts no copy down, and is not dropped from the tier in which it is used.
7. If a thread waits, a copy is under way. A copy up may wait for copies down, but a copy down waits for no thread: so
   there is no cycle.
8. A waiting thread gets one answer: it is resumed when all its units are up, with their present contents, or it fails.
9. Without new events the copies come to an end. Then no tier with units that may go down is above its limit.
10. The data that lies in a tier and the memory that waits there to be used again are within its limit together, as far
    as this memory can go: what has no room beside the data is trimmed. Copies under way take theirs from it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hpcgpu.spill.state.accounting import Accounting
from hpcgpu.spill.state.history import History, Row
from hpcgpu.spill.state.instructions import (
    DISK,
    HOST,
    Answer,
    Copy,
    Drop,
    FailedAllocation,
    Instruction,
    Leave,
    Say,
    Ticket,
    Trim,
    Unit,
)

Instructions = tuple[Instruction, ...]
# The number of ready tasks to look at: with more, units would come up that other tasks push down before their turn.
_NEXT = 4


class _Need(NamedTuple):
    priority: tuple[Any, ...]
    number: int  # of its own, so that needs of one priority have an order
    running: bool
    units: tuple[Unit, ...]


class SpillState:
    """The state machine of one store. A method that returns instructions is an event, and so is :meth:`join`.

    All calls are under the store's lock. :meth:`usage` and properties are read without it.
    """

    def __init__(self, limits: Mapping[int, int]) -> None:
        self._accounting = Accounting(limits)
        self.usage = self._accounting.usage
        # the units that tasks need, by task: they go down last, and come up before the task starts
        self._needs: dict[Hashable, _Need] = {}
        self._ready: list[_Need] = []  # of the ready tasks, the next to run first
        self._count = 0
        # units on their way up, by the next tier: the first one waits for room there, and the others wait for it
        self._coming_up: dict[int, deque[Unit]] = {}
        self._ahead: Unit | None = None  # the unit that comes up before a task needs it: one, while no thread waits
        self.pauses = False  # a unit could not be brought up: no unit comes up ahead until the next tick
        self.allocations: list[FailedAllocation] = []  # that wait: freed bytes count for the first, then for the next
        self.waiting = 0  # the number of tickets that wait
        self.stays: set[int] = set()  # tiers logged as above their limit, or as tiers from which copies fail
        self._is_leaving = False
        self.history = History(self._facts, self._accounting.count_units)

    def set(self, units: tuple[Unit, ...]) -> Instructions:
        """Let one more key name these units, each once in the tuple; a new unit lies in its tier ``at``."""
        new: tuple[Row, ...] = ()
        for unit in units:
            unit.keys += 1
            if unit.valid:
                self._accounting.touch((unit,))
            else:
                new += ((unit.nbytes, unit.top, unit.at, unit.fixed, unit.lost is not None),)
                self._accounting.add(unit)
        self.history.append(("set", units, new))
        return self._settled([])

    def delete(self, units: tuple[Unit, ...]) -> Instructions:
        """Remove a key of these units."""
        self.history.append(("delete", units))
        out: list[Instruction] = []
        for unit in units:
            unit.keys -= 1
            if not unit.keys:
                self._forget(unit, out)
        return self._settled(out)

    def used(self, units: tuple[Unit, ...], writes: bool = False) -> Instructions:
        """Use units that are up, so without a ticket; ``writes`` as in Ticket."""
        self.history.append(("used", units, writes))
        self._accounting.touch(units)
        if not writes:
            return ()
        out: list[Instruction] = []
        for unit in units:
            if unit.valid == 1 << unit.top:
                unit.dirty = True
            elif unit.tier == unit.top:
                self._spoil(unit, out)
        return self._settled(out) if out else ()

    def need(self, ticket: Ticket) -> Instructions:
        """Pin units, and bring up units below. Each must be named, or pinned by another ticket."""
        self.history.append(("need", *ticket.facts()))
        if not all(unit.valid for unit in ticket.units):
            raise ValueError("a unit that no key names cannot be needed")
        out: list[Instruction] = []
        self._accounting.touch(ticket.units)
        self.waiting += 1
        for unit in ticket.units:
            unit.pins += 1
        missing = [unit for unit in ticket.units if ticket.lacks(unit)]
        if lost := next((unit.lost for unit in missing if unit.lost), None):
            self._end(ticket, lost, out)
        elif not missing:
            self._resume(ticket, out)
            if not ticket.writes:
                return tuple(out)
        else:
            ticket.missing = len(missing)
            for unit in missing:
                unit.waiters += (ticket,)
                self._bring_up(unit)
        return self._settled(out)

    def release(self, ticket: Ticket) -> Instructions:
        """Unpin the units of a ticket that was resumed, has failed, or is given up."""
        self.history.append(("release", id(ticket), ticket.units))
        out: list[Instruction] = []
        if not ticket.over:
            ticket.over, self.waiting = True, self.waiting - 1
        for unit in ticket.units:
            unit.pins -= 1
            if unit.waiters:
                unit.waiters = tuple(t for t in unit.waiters if t is not ticket)
            self._forget(unit, out)
            self._accounting.mark_idle(unit)
        return self._settled(out)

    def grow(self, unit: Unit, nbytes: int) -> Instructions:
        """Resize a unit that is up and has a new object, which its copies below lack."""
        self.history.append(("grow", unit, nbytes))
        if unit.tier != unit.top:
            raise ValueError("a unit that is not up cannot grow")
        out: list[Instruction] = []
        self._spoil(unit, out)
        self._accounting.touch((unit,))
        self._accounting.resize(unit, nbytes)
        return self._settled(out)

    def join(self, unit: Unit, part: Unit) -> None:
        """Count one more name of a part of a unit, which is set next; a new part adds its bytes."""
        self.history.append(("join", unit, part, part.nbytes, part.keys))
        part.keys += 1
        if part.keys == 1:
            self._accounting.resize(unit, unit.nbytes + part.nbytes)

    def leave(self, unit: Unit, part: Unit) -> Instructions:
        """Count one name less of a part of a unit. With the last name the part goes, unless the unit is on disk."""
        self.history.append(("leave", unit, part, part.nbytes, part.keys))
        part.keys -= 1
        if part.keys:
            return ()
        self._accounting.resize(unit, unit.nbytes - part.nbytes)
        return self._settled([])

    def moved(self, copy: Copy, nbytes: int = 0) -> Instructions:
        """Record that a copy has succeeded; ``nbytes`` is its size there, if that differs from the unit's."""
        self.history.append(("moved", copy.unit, nbytes))
        unit, out = copy.unit, list[Instruction]()
        self._end_copy(copy)
        if copy.to == DISK:
            unit.disk_bytes = nbytes
        elif nbytes and copy.source == DISK:
            unit.nbytes, unit.disk_bytes = nbytes, unit.size(DISK)
        if copy.to > copy.source:
            self._accounting.set_valid(unit, unit.valid | 1 << copy.to)
            here = [t for t in unit.waiters if not t.lacks(unit)]
            unit.waiters = tuple(t for t in unit.waiters if t.lacks(unit))
            for ticket in here:
                ticket.missing -= 1
                if not ticket.missing:  # never for a ticket that has failed: its unit stays missing
                    self._resume(ticket, out)
        else:
            self._moved_down(copy, out)
        return self._proceed(unit, out)

    def failed(self, copy: Copy, error: Exception, for_good: bool = False) -> Instructions:
        """Record that a copy has failed; ``for_good``: the unit can never be pickled, or never be read back."""
        self.history.append(("failed", copy.unit, for_good))
        unit, out = copy.unit, list[Instruction]()
        self._end_copy(copy)
        if copy.to < copy.source:
            self._keep_up(copy, error, for_good, out)
        else:
            self.pauses = True
            if for_good:
                unit.lost = error
                if unit.keys and not self._is_leaving:
                    self._is_leaving = True
                    out.append(Leave(error))
            waiters, unit.waiters = unit.waiters, ()
            for ticket in waiters:
                if not ticket.over:
                    self._end(ticket, error, out)
        return self._proceed(unit, out)

    def alloc_failed(self, allocation: FailedAllocation) -> Instructions:
        """Make room on a device, whatever its limit; resume the thread when enough units, or all, have gone.

        The thread makes its copies down before it waits. Never for the spill thread: others wait for its copies.
        """
        self.history.append(("alloc_failed", id(allocation), allocation.tier, allocation.nbytes))
        last = max((a.until_bytes for a in self.allocations if a.tier == allocation.tier), default=0)
        allocation.had_bytes = self._accounting.freed.get(allocation.tier, 0)
        allocation.until_bytes = max(last, allocation.had_bytes) + allocation.nbytes
        self.allocations.append(allocation)
        return self._settled([])

    def alloc_given_up(self, allocation: FailedAllocation) -> Instructions:
        """Forget an allocation; the copies under way for it continue in another thread."""
        self.history.append(("alloc_given_up", id(allocation)))
        if allocation in self.allocations:  # the later ones may still wait for its bytes, too
            self.allocations.remove(allocation)
        return self._settled([])

    def limit(self, tier: int, nbytes: int) -> Instructions:
        """Set or change the limit of a tier: of a device when its size is known."""
        self.history.append(("limit", tier, nbytes))
        self._accounting.limit(tier, nbytes)
        return self._settled([])

    def shrink(self, tier: int, nbytes: int) -> Instructions:
        """Free ``nbytes`` once, even below the limit: first memory that is kept for reuse, then data."""
        self.history.append(("shrink", tier, nbytes))
        self._accounting.shrink(tier, nbytes)
        return self._settled([Trim(tier)])

    def kept(self, tier: int, nbytes: int) -> Instructions:
        """Record the memory that waits in a tier to be used again."""
        self.history.append(("kept", tier, nbytes))
        self._accounting.keep(tier, nbytes)
        return self._settled([])

    def expect(self, task: Hashable, units: Iterable[Unit], priority: tuple[float, ...], running: bool) -> Instructions:
        """Record the units that a ready or running task needs; the ready task of the least priority runs next."""
        self._forget_need(task)
        self._count += 1
        units = tuple(unit for unit in dict.fromkeys(units) if unit.valid)
        self.history.append(("expect", hash(task), units, priority, running))
        need = self._needs[task] = _Need(priority, self._count, running, units)
        if not running:
            insort(self._ready, need)
        for unit in units:
            if running:
                unit.running += 1
            else:
                unit.waiting = unit.waiting or {}
                unit.waiting[task] = priority
        return self._settled([])

    def task_over(self, task: Hashable) -> Instructions:
        """Forget the needs of a task that is over, or does not run here."""
        self.history.append(("task_over", hash(task)))
        self._forget_need(task)
        return self._settled([])

    def tick(self) -> Instructions:
        """Try failed copies again; to be called about once a second while :attr:`is_stuck`."""
        self.history.append(("tick",))
        self._accounting.unstick()
        self.pauses = False
        return self._settled([])

    def excess(self, nbytes: int) -> int:
        """Record the host memory that waits to be used again; return the part of it without room beside the data."""
        self.history.append(("excess", nbytes))
        return self._accounting.keep(HOST, nbytes)

    @property
    def kept_bytes(self) -> int:
        """Host memory that waits to be used again, as last recorded."""
        return self._accounting.kept.get(HOST, 0)

    @property
    def lower_bytes(self) -> int:
        """Bytes of the units that are below the tier in which they are used."""
        return self._accounting.lower_bytes

    @property
    def moves(self) -> int:
        """The number of copies under way."""
        return len(self._accounting.moving)

    @property
    def is_stuck(self) -> bool:
        """True if a copy has failed that may succeed later."""
        return bool(self._accounting.blocked) or self.pauses

    def _facts(self) -> Iterator[Row]:
        """Yield all that later decisions depend on; a new machine with these facts makes the same decisions."""
        accounting = self._accounting
        numbers = {name: getattr(self, name) for name in ("_count", "waiting", "pauses", "_is_leaving")}
        yield "state", numbers, sorted(self.stays), accounting.numbers(), sorted(accounting.stuck)
        yield from accounting.facts()
        yield from (("needs", hash(task), *need) for task, need in self._needs.items())
        yield from (("queue", tier, (*queue,)) for tier, queue in self._coming_up.items())
        yield from (("ahead", unit) for unit in (self._ahead,) if unit)
        yield from (("allocation", id(a), a.tier, a.nbytes, a.until_bytes, a.had_bytes) for a in self.allocations)
        waiters = {unit: unit.waiters for unit in accounting.units() if unit.waiters}
        for ticket in dict.fromkeys(ticket for tickets in waiters.values() for ticket in tickets):
            yield "ticket", *ticket.facts(), ticket.missing, ticket.over
        yield from (("waiters", unit, [*map(id, tickets)]) for unit, tickets in waiters.items())

    def _forget_need(self, task: Hashable) -> None:
        if (need := self._needs.pop(task, None)) is None:
            return
        if not need.running:
            del self._ready[bisect_left(self._ready, need)]
        for unit in need.units:
            if need.running:
                unit.running -= 1
            elif unit.waiting:
                unit.waiting.pop(task, None)

    def _forget(self, unit: Unit, out: list[Instruction]) -> None:
        if not unit.keys and not unit.pins and unit.move is None and unit.valid:
            if unit.valid == 1 << unit.top:
                self._accounting.remove(unit, out)
            else:
                self._accounting.drop(unit, unit.valid, out)
            if unit.dirty or unit.disk_bytes:  # most objects have neither, and these would be their first
                unit.dirty, unit.disk_bytes = False, 0

    def _end(self, ticket: Ticket, error: Exception | None, out: list[Instruction]) -> None:
        ticket.over, self.waiting = True, self.waiting - 1
        out.append(Answer(ticket, error))

    def _resume(self, ticket: Ticket, out: list[Instruction]) -> None:
        for unit in ticket.units if ticket.writes else ():
            self._spoil(unit, out)
        self._end(ticket, None, out)

    def _spoil(self, unit: Unit, out: list[Instruction]) -> None:
        unit.dirty = True
        self._accounting.drop(unit, unit.valid & ~(1 << unit.top), out)

    def _end_copy(self, copy: Copy) -> None:
        if copy.unit.move != copy.to:
            raise ValueError(f"no copy to tier {copy.to} is under way")
        if copy.unit is self._ahead:
            self._ahead = None
        self._accounting.end(copy)

    def _proceed(self, unit: Unit, out: list[Instruction]) -> Instructions:
        self._bring_up(unit)
        self._forget(unit, out)
        self._accounting.mark_idle(unit)
        return self._settled(out)

    def _moved_down(self, copy: Copy, out: list[Instruction]) -> None:
        """Give up a unit above its new copy. If the unit was used meanwhile it stays up: it is clean, and may go."""
        unit = copy.unit
        is_used = unit.pins > 0 or unit.age != copy.age
        if is_used and unit.dirty:
            out.append(Drop(unit, copy.to))  # it may have been written to since
        else:
            self._accounting.set_valid(unit, unit.valid | 1 << copy.to)
            if not is_used:
                unit.dirty = False
                self._accounting.drop(unit, 1 << copy.source, out)

    def _keep_up(self, copy: Copy, error: Exception, for_good: bool, out: list[Instruction]) -> None:
        unit, tier = copy.unit, copy.source
        if for_good:
            unit.fixed = True
            out.append(Say("immovable", tier, unit.nbytes, error))
            return
        self._accounting.block(unit)
        if tier not in self.stays:
            self.stays.add(tier)
            out.append(Say("stays", tier, unit.nbytes, error))

    def _settled(self, out: list[Instruction]) -> Instructions:
        """Add the instructions that follow from the new state."""
        accounting = self._accounting
        if accounting.lower or accounting.shrunk or self.allocations or accounting.is_over:
            self._continue(out)  # else all units are up, and have room
        for tier in tuple(self.stays) if self.stays else ():
            if tier not in accounting.blocked and accounting.fits(tier, 0):
                self.stays.discard(tier)
                out.append(Say("fits", tier, 0, None))
        if len(self.history) > self.history.most:
            self.history.turn()
        return tuple(out)

    def _continue(self, out: list[Instruction]) -> None:
        accounting = self._accounting
        self._serve(out)
        if accounting.settle(out) and accounting.over(HOST) > 0 and HOST not in self.stays:
            self.stays.add(HOST)
            out.append(Say("stays", HOST, accounting.over(HOST), None))
        accounting.trim(out)
        for tier, queue in self._coming_up.items():
            while queue and self._start(queue[0], tier, out):
                queue.popleft()
        if accounting.lower and not self.waiting and not self.allocations:
            self._fetch_ahead(out)

    def _bring_up(self, unit: Unit) -> None:
        """Let a unit continue up, if a ticket waits for it and no copy of it is under way."""
        if unit.waiters and unit.move is None:
            queue = self._coming_up.setdefault(_above(unit), deque())
            (queue.appendleft if _is_urgent(unit) else queue.append)(unit)

    def _start(self, unit: Unit, to: int, out: list[Instruction]) -> bool:
        """Start a copy up, if there is room or none can be made; return False if the unit must wait."""
        accounting = self._accounting
        if unit.move is not None or not unit.waiters or unit.tier >= to or _above(unit) != to:
            return True  # its tickets were given up, or it is on its way, or has gone to disk
        accounting.make_room(to, out, unit.nbytes)
        if not accounting.fits(to, unit.nbytes) and accounting.leaving.get(to) and not _is_urgent(unit):
            return False
        accounting.start(unit, to, unit.waiters[0], out)
        return True

    def _fetch_ahead(self, out: list[Instruction]) -> None:
        """Bring up the first unit that the next tasks need and that fits without another move."""
        accounting = self._accounting
        if self._ahead or self.pauses:
            return
        for unit in (unit for need in self._ready[:_NEXT] for unit in need.units):
            if unit.valid and unit.tier != unit.top and unit.move is None and unit.lost is None:
                to = _above(unit)
                if all(accounting.fits(tier, unit.nbytes, accounting.low) for tier in (to, unit.top)):
                    self._ahead = unit
                    accounting.start(unit, to, None, out)
                    return

    def _serve(self, out: list[Instruction]) -> None:
        """Send down the missing bytes of allocations; resume those that have room, and fail hopeless ones."""
        freed, leaving = self._accounting.freed, self._accounting.leaving
        for allocation in tuple(self.allocations):
            tier = allocation.tier
            if (missing := allocation.until_bytes - freed.get(tier, 0) - leaving.get(tier, 0)) > 0:
                self._accounting.send_down(tier, missing, missing, allocation, out)
            if freed.get(tier, 0) >= allocation.until_bytes or not leaving.get(tier):
                self.allocations.remove(allocation)
                has_room = freed.get(tier, 0) > allocation.had_bytes
                out.append(Answer(allocation, None if has_room else MemoryError()))


def _is_urgent(unit: Unit) -> bool:
    return any(ticket.at_once for ticket in unit.waiters)


def _above(unit: Unit) -> int:
    return unit.top if unit.tier == HOST else HOST
