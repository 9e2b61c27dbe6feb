"""The tier of every unit, the moves under way, and the next steps: events in, instructions out.

Pure: no threads, no I/O, no clock. The executor (:mod:`hpcgpu.spill.store.executor`) holds one lock while it calls a
method. It takes a drop's references under that lock, too. It carries out the other instructions in their order, without
the lock.

The laws. The tests (``spill_invariants.py``) check the first seven in each state, and all nine in all states of small
stores.

1. The bytes of a tier are those that are valid there, and those under way to it.
2. A named unit is valid somewhere at every moment.
3. A unit has at most one copy under way.
4. A copy goes from the highest valid tier to the next one, up or down, and the former stays valid until the copy ends.
5. A dirty unit is valid in one tier only: the one in which it is used.
6. A pinned unit starts no copy down, and is not dropped from the tier in which it is used.
7. Nobody waits when nothing is under way. A way up may wait for copies down, and a copy down waits for nobody: so there
   is no cycle.
8. A thread that waits is told once: it is resumed when all its units are up, with their present contents, or it fails.
9. Without new events the copies come to an end. Then no tier is above its limit if something may go from there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from hpcgpu.spill.state.accounting import Accounting, Choice
from hpcgpu.spill.state.allocations import FailedAllocations
from hpcgpu.spill.state.policy import victims
from hpcgpu.spill.state.prefetch import Prefetch
from hpcgpu.spill.state.units import (
    DISK,
    HOST,
    Copy,
    Drop,
    Fail,
    FailedAllocation,
    Instruction,
    Leave,
    Resume,
    Say,
    Ticket,
    Trim,
    Unit,
)
from hpcgpu.spill.state.unspills import Unspills

Instructions = tuple[Instruction, ...]


class SpillState:
    """The state machine of one store; parameters as of :class:`hpcgpu.spill.state.accounting.Accounting`.

    Every method except the constructor and :meth:`join` is an event, and returns the instructions that follow from it.

    Pure: no threads, no I/O, no clock. Executor makes it. Executor, GpuSpillBuffer, Reader and SpillThread tell it of
    events, all under the store's lock. Only single numbers, and :attr:`is_stuck`, are read without the lock.
    """

    def __init__(self, limits: Mapping[int, int], low: float = 0.95, choose: Choice = victims) -> None:
        self.accounting, self.prefetch = Accounting(limits, low, choose), Prefetch()
        self.keys: dict[Hashable, tuple[Unit, ...]] = {}
        self.allocations = FailedAllocations(self.accounting)
        self.waiting = 0  # tickets
        self.unspills = Unspills(self.accounting)
        self._is_leaving = False
        self.stays: set[int] = set()  # tiers that stay above their limit, or from which copies fail, which was said

    def set(self, key: Hashable, units: tuple[Unit, ...]) -> Instructions:
        """Let a key name these units, each given once; a new unit lies in its tier ``at``."""
        out: list[Instruction] = []
        old = self.keys.get(key, ())
        self.keys[key] = units
        for unit in units:
            unit.keys += 1
            if unit.valid:
                self.accounting.touch((unit,))
            else:
                self.accounting.add(unit)
        if old:
            self._unname(old, out)
        return self._settled(out)

    def delete(self, key: Hashable) -> Instructions:
        """Remove a key."""
        out: list[Instruction] = []
        self._unname(self.keys.pop(key), out)
        return self._settled(out)

    def used(self, units: Iterable[Unit], writes: bool = False) -> Instructions:
        """Units are used at once, without a ticket, since they are up; ``writes`` as of a ticket."""
        self.accounting.touch(units)
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
        """Pin units, and bring up those below. Each must be named, or pinned by another ticket."""
        if not all(unit.valid for unit in ticket.units):
            raise ValueError("a unit that no key names cannot be needed")
        out: list[Instruction] = []
        self.accounting.touch(ticket.units)
        self.waiting += 1
        for unit in ticket.units:
            unit.pins += 1
        missing = [unit for unit in ticket.units if ticket.lacks(unit)]
        if lost := next((unit.lost for unit in missing if unit.lost), None):
            self._end(ticket, Fail(ticket, lost), out)
        elif not missing:
            self._resume(ticket, out)
            if not ticket.writes:
                return tuple(out)
        else:
            ticket.missing = len(missing)
            for unit in missing:
                unit.waiters += (ticket,)
                self.unspills.add(unit)
        return self._settled(out)

    def release(self, ticket: Ticket) -> Instructions:
        """Unpin the units of a ticket that was resumed, has failed, or is given up."""
        out: list[Instruction] = []
        if not ticket.over:
            ticket.over, self.waiting = True, self.waiting - 1
        for unit in ticket.units:
            unit.pins -= 1
            if unit.waiters:
                unit.waiters = tuple(t for t in unit.waiters if t is not ticket)
            self._forget(unit, out)
            self.accounting.mark_idle(unit)
        return self._settled(out)

    def grow(self, unit: Unit, nbytes: int) -> Instructions:
        """A unit that is up has one more object, which its copies below do not have."""
        if unit.tier != unit.top:
            raise ValueError("a unit that is not up cannot grow")
        out: list[Instruction] = []
        self._spoil(unit, out)
        self.accounting.touch((unit,))
        self.accounting.resize(unit, nbytes)
        self.accounting.mark_idle(unit)
        return self._settled(out)

    def join(self, unit: Unit, part: Unit) -> None:
        """One more name has a part of a unit, which is set next; a new part adds its bytes to the unit.

        A unit that gets a new part is in its first tier, and in no other.
        """
        part.keys += 1
        if part.keys > 1:
            return
        if unit.valid:
            self.accounting.bytes[unit.tier] += part.nbytes
            self.accounting.lower_bytes += part.nbytes if unit.tier != unit.top else 0
            if unit.move is not None:
                self.accounting.leaving[unit.tier] += part.nbytes
        unit.nbytes, unit.disk_bytes = unit.nbytes + part.nbytes, 0

    def leave(self, unit: Unit, part: Unit) -> Instructions:
        """One name less has a part of a unit. With the last name the part goes, unless the unit is on disk."""
        part.keys -= 1
        if part.keys:
            return ()
        self.accounting.resize(unit, unit.nbytes - part.nbytes)
        if self.accounting.stuck:
            self.accounting.mark_idle(unit)
        return self._settled([])

    def moved(self, copy: Copy, nbytes: int = 0) -> Instructions:
        """A copy has succeeded; ``nbytes`` is its size there, if that differs from the unit's."""
        unit, out = copy.unit, list[Instruction]()
        self._end_copy(copy)
        if copy.to == DISK:
            unit.disk_bytes = nbytes
        elif nbytes and copy.source == DISK:
            unit.nbytes, unit.disk_bytes = nbytes, unit.size(DISK)
        if copy.to > copy.source:
            self.accounting.set_valid(unit, unit.valid | 1 << copy.to)
            self._arrived(unit, out)
        else:
            self._went_down(copy, out)
        return self._went_on(unit, out)

    def failed(self, copy: Copy, error: Exception, for_good: bool = False) -> Instructions:
        """A copy has failed; ``for_good``: the unit can never be pickled, or never be read back."""
        unit, out = copy.unit, list[Instruction]()
        self._end_copy(copy)
        if copy.to < copy.source:
            self._stays_up(copy, error, for_good, out)
        else:
            self.unspills.pauses = True
            if for_good:
                unit.lost = error
                if unit.keys and not self._is_leaving:
                    self._is_leaving = True
                    out.append(Leave(unit, error))
            waiters, unit.waiters = unit.waiters, ()
            for ticket in waiters:
                if not ticket.over:
                    self._end(ticket, Fail(ticket, error), out)
        return self._went_on(unit, out)

    def alloc_failed(self, room: FailedAllocation) -> Instructions:
        """Make room on a device, whatever its limit; the thread is resumed when enough has gone, or all that can.

        It carries out its copies down before it waits. The spill thread never asks for room, since others wait for its
        copies: where it cannot allocate, its copy has failed.
        """
        self.allocations.add(room)
        return self._settled([])

    def alloc_given_up(self, room: FailedAllocation) -> Instructions:
        """A thread waits for room no more; its copies go on, in another thread."""
        self.allocations.forget(room)
        return self._settled([])

    def limit(self, tier: int, nbytes: int) -> Instructions:
        """Set the limit of a tier: of a device when its size is known, or anew."""
        self.accounting.limits[tier] = nbytes
        self.accounting.unblock()
        return self._settled([])

    def shrink(self, tier: int, nbytes: int) -> Instructions:
        """Free so many bytes once, even below the limit: first memory that is kept to be used again, then data."""
        out: list[Instruction] = [Trim(tier)]
        self.accounting.stuck.discard(tier)
        self.accounting.shrunk[tier] = max(0, self.accounting.bytes.get(tier, 0) - nbytes)
        return self._settled(out)

    def expect(
        self, task: Hashable, keys: Iterable[Hashable], priority: tuple[float, ...], running: bool
    ) -> Instructions:
        """A task that is ready or runs needs these keys; missing ones are passed over; the least priority runs next."""
        units = dict.fromkeys(unit for key in keys for unit in self.keys.get(key, ()))
        self.prefetch.add(task, tuple(units), priority, running)
        return self._settled([])

    def task_over(self, task: Hashable) -> Instructions:
        """A task needs nothing any more: it is over, or does not run here."""
        self.prefetch.forget(task)
        return self._settled([])

    def tick(self) -> Instructions:
        """Try again what has failed; to be called about once a second while :attr:`is_stuck`."""
        self.accounting.unblock()
        self.unspills.pauses = False
        return self._settled([])

    @property
    def is_stuck(self) -> bool:
        """Whether something has failed that may work later."""
        return bool(self.accounting.blocked) or self.unspills.pauses

    def _unname(self, units: Iterable[Unit], out: list[Instruction]) -> None:
        for unit in units:
            unit.keys -= 1
            if not unit.keys:
                self._forget(unit, out)

    def _forget(self, unit: Unit, out: list[Instruction]) -> None:
        if not unit.keys and not unit.pins and unit.move is None and unit.valid:
            if unit.valid == 1 << unit.top:
                self.accounting.remove(unit, out)
            else:
                self.accounting.drop(unit, unit.valid, out)
            if unit.dirty or unit.disk_bytes:  # most objects have neither, and these would be their first
                unit.dirty, unit.disk_bytes = False, 0

    def _end(self, ticket: Ticket, how: Resume | Fail, out: list[Instruction]) -> None:
        ticket.over, self.waiting = True, self.waiting - 1
        out.append(how)

    def _resume(self, ticket: Ticket, out: list[Instruction]) -> None:
        for unit in ticket.units if ticket.writes else ():
            self._spoil(unit, out)
        self._end(ticket, Resume(ticket), out)

    def _spoil(self, unit: Unit, out: list[Instruction]) -> None:
        unit.dirty = True
        self.accounting.drop(unit, unit.valid & ~(1 << unit.top), out)

    def _arrived(self, unit: Unit, out: list[Instruction]) -> None:
        here = [t for t in unit.waiters if not t.lacks(unit)]
        unit.waiters = tuple(t for t in unit.waiters if t.lacks(unit))
        for ticket in here:
            ticket.missing -= 1
            if not ticket.missing:  # never for a ticket that has failed: its unit stays missing
                self._resume(ticket, out)

    def _end_copy(self, copy: Copy) -> None:
        if copy.unit.move != copy.to:
            raise ValueError(f"no copy to tier {copy.to} is under way")
        if copy.unit is self.unspills.ahead:
            self.unspills.ahead = None
        self.accounting.end(copy)

    def _went_on(self, unit: Unit, out: list[Instruction]) -> Instructions:
        self.unspills.add(unit)
        self._forget(unit, out)
        self.accounting.mark_idle(unit)
        return self._settled(out)

    def _went_down(self, copy: Copy, out: list[Instruction]) -> None:
        """A copy below is made. If the unit was used meanwhile it stays up: it is clean, and may go later."""
        unit = copy.unit
        is_used = unit.pins > 0 or unit.age != copy.age
        if is_used and unit.dirty:
            out.append(Drop(unit, copy.to))  # it may have been written to since
        else:
            self.accounting.set_valid(unit, unit.valid | 1 << copy.to)
            if not is_used:
                unit.dirty = False
                self.accounting.drop(unit, 1 << copy.source, out)

    def _stays_up(self, copy: Copy, error: Exception, for_good: bool, out: list[Instruction]) -> None:
        unit, tier = copy.unit, copy.source
        if for_good:
            unit.fixed = True
            out.append(Say("immovable", tier, unit.nbytes, error))
            return
        self.accounting.blocked[tier] = min(unit.nbytes, self.accounting.blocked.get(tier, unit.nbytes))
        self.accounting.postpone(unit)
        if tier not in self.stays:
            self.stays.add(tier)
            out.append(Say("stays", tier, unit.nbytes, error))

    def _say_what_fits(self, out: list[Instruction]) -> None:
        for tier in tuple(self.stays):
            if tier not in self.accounting.blocked and self.accounting.fits(tier, 0):
                self.stays.discard(tier)
                out.append(Say("fits", tier, 0, None))

    def _settled(self, out: list[Instruction]) -> Instructions:
        """Add the instructions that follow from the new state."""
        accounting = self.accounting
        if accounting.lower or accounting.shrunk or self.allocations.waiting or accounting.is_over:
            self._go_on(out)  # else all units are up, and have room
        if self.stays:
            self._say_what_fits(out)
        return tuple(out)

    def _go_on(self, out: list[Instruction]) -> None:
        accounting = self.accounting
        accounting.refused = False
        if self.allocations.waiting:
            self.allocations.serve(out)
        accounting.settle(out)
        if accounting.refused and accounting.over(HOST) > 0 and HOST not in self.stays:
            self.stays.add(HOST)
            out.append(Say("stays", HOST, accounting.over(HOST), None))
        if accounting.shrunk:
            accounting.end_shrinking(out)
        self.unspills.go_on(out)
        if self.prefetch and accounting.lower and not self.waiting and not self.allocations.waiting:
            self.unspills.fetch_ahead(self.prefetch, out)
