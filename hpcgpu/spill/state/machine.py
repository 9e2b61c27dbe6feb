"""Where every unit is, what is under way, and what to do next: events in, instructions out.

Pure: no threads, no I/O, no clock. The executor (:mod:`hpcgpu.spill.store.executor`) holds one lock while it
calls a method. It takes a drop's references under that lock, too; it carries out the others in their order, without it.

The laws. ``invariants.broken`` tells the first seven of a state; ``tests/unit/spill/state`` goes through all states of
small stores for all of them.

1. The bytes of a place are the sum of what is valid there and of what is under way to it.
2. A named unit is valid somewhere at every moment.
3. A unit has one copy under way, at most.
4. A copy starts from the highest place that is valid, and that stays valid until the copy ends.
5. What is dirty is valid in one place alone, where it is used.
6. A pinned unit starts no copy down, and is not taken from where it is used.
7. Nobody waits when nothing is under way. A way up may wait for copies down, a copy down waits for nobody: so there is
   no cycle.
8. Who waits is told once: resumed when all units are up, with their present contents, or failed.
9. Copies alone come to an end, and then no place is above its limit from which something may go.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from hpcgpu.spill.state.expected import Expected
from hpcgpu.spill.state.policy import victims
from hpcgpu.spill.state.rooms import Rooms
from hpcgpu.spill.state.tiers import Choice, Tiers
from hpcgpu.spill.state.units import (
    DISK,
    HOST,
    Copy,
    Drop,
    Fail,
    Instruction,
    Leave,
    Release,
    Resume,
    Room,
    Say,
    Ticket,
    Unit,
)
from hpcgpu.spill.state.ups import Ups

Instructions = tuple[Instruction, ...]


class SpillState:
    """The state machine of one store; parameters as those of :class:`hpcgpu.spill.state.tiers.Tiers`.

    Every method but the constructor and :meth:`join` is an event, and returns what is to be done now.

    Pure: no threads, no I/O, no clock. Executor makes it, and tells it of events, as do GpuSpillBuffer, Keeper and
    Spiller, all under the store's lock. Only single numbers, and :attr:`is_stuck`, are read without.
    """

    def __init__(self, limits: Mapping[int, int], low: float = 0.95, choose: Choice = victims) -> None:
        self.tiers, self.expected = Tiers(limits, low, choose), Expected()
        self.keys: dict[Hashable, tuple[Unit, ...]] = {}
        self.rooms = Rooms(self.tiers)
        self.waiting = 0  # tickets
        self.ups = Ups(self.tiers)
        self._is_leaving = False
        self._stays: set[int] = set()  # places of which it was said that what is above the limit stays

    def set(self, key: Hashable, units: tuple[Unit, ...]) -> Instructions:
        """Let a key name these units, each given once; new ones lie where they are ``at``."""
        out: list[Instruction] = []
        old = self.keys.get(key, ())
        self.keys[key] = units
        for unit in units:
            unit.keys += 1
            if unit.valid:
                self.tiers.touch((unit,))
            else:
                self.tiers.add(unit)
                self.tiers.note_idle(unit)
        if old:
            self._unname(old, out)
        return self._settled(out)

    def delete(self, key: Hashable) -> Instructions:
        """Let a key name nothing any more."""
        out: list[Instruction] = []
        self._unname(self.keys.pop(key), out)
        return self._settled(out)

    def used(self, units: Iterable[Unit], writes: bool = False) -> Instructions:
        """Note that units are used at once, without a ticket: they are up; ``writes`` as of a ticket."""
        self.tiers.touch(units)
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
        """Pin units, and bring up what is below. Each must be named, or pinned by another ticket."""
        if not all(unit.valid for unit in ticket.units):
            raise ValueError("a unit that no key names cannot be needed")
        out: list[Instruction] = []
        self.tiers.touch(ticket.units)
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
                self.ups.add(unit)
        return self._settled(out)

    def release(self, ticket: Ticket) -> Instructions:
        """Unpin the units of a ticket that was resumed, has failed, or gives up."""
        out: list[Instruction] = []
        if not ticket.over:
            ticket.over, self.waiting = True, self.waiting - 1
        for unit in ticket.units:
            unit.pins -= 1
            if unit.waiters:
                unit.waiters = tuple(t for t in unit.waiters if t is not ticket)
            self._forget(unit, out)
            self.tiers.note_idle(unit)
        return self._settled(out)

    def grow(self, unit: Unit, nbytes: int) -> Instructions:
        """Take note that one more object lies in a unit, which is up: no copy below has it."""
        if unit.tier != unit.top:
            raise ValueError("a unit that is not up cannot grow")
        out: list[Instruction] = []
        self._spoil(unit, out)
        self.tiers.touch((unit,))
        self.tiers.resize(unit, nbytes)
        self.tiers.note_idle(unit)
        return self._settled(out)

    def join(self, unit: Unit, part: Unit) -> None:
        """Let one name more have a part of a unit, which is set next; with a new part more lies in it.

        Then it is where it was at first, and nowhere else.
        """
        part.keys += 1
        if part.keys > 1:
            return
        if unit.valid:
            self.tiers.bytes[unit.tier] += part.nbytes
            self.tiers.lower_bytes += part.nbytes if unit.tier != unit.top else 0
            if unit.move is not None:
                self.tiers.leaving[unit.tier] += part.nbytes
        unit.nbytes, unit.disk_bytes = unit.nbytes + part.nbytes, 0

    def leave(self, unit: Unit, part: Unit) -> Instructions:
        """Let one name less have a part of a unit: with the last it has gone, wherever the unit is but on disk."""
        part.keys -= 1
        if part.keys:
            return ()
        self.tiers.resize(unit, unit.nbytes - part.nbytes)
        self.tiers.note_idle(unit)
        return self._settled([])

    def moved(self, copy: Copy, nbytes: int = 0) -> Instructions:
        """Take note of a copy that has ended well; ``nbytes`` is what it takes there, if that is another size."""
        unit, out = copy.unit, list[Instruction]()
        self._end_copy(copy)
        if copy.to == DISK:
            unit.disk_bytes = nbytes
        elif nbytes and copy.source == DISK:
            unit.nbytes, unit.disk_bytes = nbytes, unit.size(DISK)
        if copy.to > copy.source:
            self.tiers.place(unit, unit.valid | 1 << copy.to)
            self._arrived(unit, out)
        else:
            self._went_down(copy, out)
        return self._went_on(unit, out)

    def failed(self, copy: Copy, error: Exception, for_good: bool = False) -> Instructions:
        """Take note of a copy that has failed; ``for_good``: it cannot be pickled, or cannot be read back, ever."""
        unit, out = copy.unit, list[Instruction]()
        self._end_copy(copy)
        if copy.to < copy.source:
            self._stays_up(copy, error, for_good, out)
        else:
            self.ups.pauses = True
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

    def alloc_failed(self, room: Room) -> Instructions:
        """Make room on a device, whatever its limit; the thread is resumed when enough has gone, or all that can.

        It carries out its copies down before it waits. The spill thread never asks for room, since others wait for its
        copies: where it cannot allocate, its copy has failed.
        """
        self.rooms.add(room)
        return self._settled([])

    def limit(self, place: int, nbytes: int) -> Instructions:
        """Set the limit of a place: of a device when its size is known, or anew."""
        self.tiers.limits[place] = nbytes
        self.tiers.unblock()
        return self._settled([])

    def shrink(self, place: int, nbytes: int) -> Instructions:
        """Free so many bytes once, also below the limit: first what is kept to be used again, then data."""
        out: list[Instruction] = [Release(place)]
        self.tiers.stuck.discard(place)
        self.tiers.shrunk[place] = max(0, self.tiers.bytes.get(place, 0) - nbytes)
        return self._settled(out)

    def expect(
        self, task: Hashable, keys: Iterable[Hashable], priority: tuple[float, ...], running: bool
    ) -> Instructions:
        """Note what a task needs that is ready or runs, of the keys that are there; the least priority runs next."""
        units = dict.fromkeys(unit for key in keys for unit in self.keys.get(key, ()))
        self.expected.note(task, tuple(units), priority, running)
        return self._settled([])

    def task_over(self, task: Hashable) -> Instructions:
        """Note that a task needs nothing any more: it is over, or does not run here."""
        self.expected.forget(task)
        return self._settled([])

    def tick(self) -> Instructions:
        """Try again what has failed; once a second or so, as long as :attr:`is_stuck`."""
        self.tiers.unblock()
        self.ups.pauses = False
        return self._settled([])

    @property
    def is_stuck(self) -> bool:
        """Whether something has failed that may work later."""
        return bool(self.tiers.blocked) or self.ups.pauses

    def _unname(self, units: Iterable[Unit], out: list[Instruction]) -> None:
        for unit in units:
            unit.keys -= 1
            self._forget(unit, out)

    def _forget(self, unit: Unit, out: list[Instruction]) -> None:
        if not unit.keys and not unit.pins and unit.move is None and unit.valid:
            self.tiers.drop(unit, unit.valid, out)
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
        self.tiers.drop(unit, unit.valid & ~(1 << unit.top), out)

    def _arrived(self, unit: Unit, out: list[Instruction]) -> None:
        here = [t for t in unit.waiters if not t.lacks(unit)]
        unit.waiters = tuple(t for t in unit.waiters if t.lacks(unit))
        for ticket in here:
            ticket.missing -= 1
            if not ticket.missing:  # never of one that has failed: a unit stays missing
                self._resume(ticket, out)

    def _end_copy(self, copy: Copy) -> None:
        if copy.unit.move != copy.to:
            raise ValueError(f"no copy to place {copy.to} is under way")
        if copy.unit is self.ups.ahead:
            self.ups.ahead = None
        self.tiers.end(copy)

    def _went_on(self, unit: Unit, out: list[Instruction]) -> Instructions:
        self.ups.add(unit)
        self._forget(unit, out)
        self.tiers.note_idle(unit)
        return self._settled(out)

    def _went_down(self, copy: Copy, out: list[Instruction]) -> None:
        """Take note of a copy below. The unit stays up, where it was used meanwhile: it is clean, and may go later."""
        unit = copy.unit
        is_used = unit.pins > 0 or unit.age != copy.age
        if is_used and unit.dirty:
            out.append(Drop(unit, copy.to))  # it may have been written to since
        else:
            self.tiers.place(unit, unit.valid | 1 << copy.to)
            if not is_used:
                unit.dirty = False
                self.tiers.drop(unit, 1 << copy.source, out)
        if copy.source in self._stays and copy.source not in self.tiers.blocked and self.tiers.over(copy.source) <= 0:
            self._stays.discard(copy.source)
            out.append(Say("works again", copy.source, unit.nbytes, None))

    def _stays_up(self, copy: Copy, error: Exception, for_good: bool, out: list[Instruction]) -> None:
        unit, place = copy.unit, copy.source
        if for_good:
            unit.fixed = True
            out.append(Say("immovable", place, unit.nbytes, error))
            return
        self.tiers.blocked[place] = min(unit.nbytes, self.tiers.blocked.get(place, unit.nbytes))
        self.tiers.postpone(unit)
        if place not in self._stays:
            self._stays.add(place)
            out.append(Say("stays", place, unit.nbytes, error))

    def _settled(self, out: list[Instruction]) -> Instructions:
        """Decide what else is to be done now."""
        tiers = self.tiers
        if not (tiers.lower or tiers.shrunk or self.rooms.waiting or tiers.is_over):
            return tuple(out)  # all is up, and has room
        tiers.refused = False
        if self.rooms.waiting:
            self.rooms.serve(out)
        tiers.settle(out)
        if tiers.refused and tiers.over(HOST) > 0 and HOST not in self._stays:
            self._stays.add(HOST)
            out.append(Say("stays", HOST, tiers.over(HOST), None))
        if tiers.shrunk:
            tiers.end_shrinking(out)
        self.ups.go_on(out)
        if self.expected and tiers.lower and not self.waiting and not self.rooms.waiting:
            self.ups.fetch_ahead(self.expected, out)
        return tuple(out)
