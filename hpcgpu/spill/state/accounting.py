"""The accounting of the state machine: bytes by tier, orders of use, and moves down; pure, under the store's lock."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from hpcgpu.spill.state.history import Row
from hpcgpu.spill.state.instructions import DISK, HOST, Copy, Drop, Instruction, Trim, Unit, Waiter, below, tiers_in
from hpcgpu.spill.state.victims import Candidate, headroom, victims

_Order = OrderedDict[int, Unit]
_TABLES = ("limits", "bytes", "coming", "leaving", "freed", "blocked", "shrunk", "kept", "copy_bytes")
UNIT_FIELDS = ("name", "nbytes", "disk_bytes", "top", "at", "valid", "tier", "keys", "pins", "age", "dirty", "fixed")
_facts_of = attrgetter(*UNIT_FIELDS)


class Usage(NamedTuple):
    """The bytes of a tier at one moment."""

    limit: int  # 0: none
    total: int  # valid there, or under way to it
    copies: int  # of units that are valid higher up, too
    coming: int  # under way to it
    leaving: int  # on their way down, and still there


class Accounting:
    """All units by tier, their bytes and orders of use. Its methods alone change it; all is under the store's lock.

    A tier that is not in ``limits`` has no limit. Orders are OrderedDicts: to remove the oldest items of a dict again
    and again is quadratic.
    """

    low = 0.95  # moves down begin above a limit and continue down to this part of it
    choose = staticmethod(victims)

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = dict(limits)
        # by tier
        self.bytes: dict[int, int] = {}  # valid there, or under way to it
        self.coming: dict[int, int] = {}  # bytes under way to it
        self.leaving: dict[int, int] = {}  # bytes on their way down that still lie there
        self.freed: dict[int, int] = {}  # bytes given up there so far
        self.blocked: dict[int, int] = {}  # the size from which copies down from it fail, until something changes
        self.stuck: set[int] = set()  # above its limit, but no unit may go until something changes: no event looks
        self.shrunk: dict[int, int] = {}  # the bytes to which it must go down once
        self.kept: dict[int, int] = {}  # bytes that wait there to be used again, beside its units
        # the units whose highest tier it is, longest untouched first, without units on their way down
        self.orders: dict[int, _Order] = defaultdict(OrderedDict)
        self.copies: dict[int, _Order] = {HOST: OrderedDict(), DISK: OrderedDict()}  # units valid there and higher up
        self.copy_bytes = {HOST: 0, DISK: 0}
        self.lower = self.lower_bytes = 0  # units below the tier in which they are used, and their bytes there
        self._refused = False  # a unit that should go to disk stays in host memory, since the disk's limit is reached
        self.moving: dict[int, Copy] = {}  # the copies under way, by the names of their units
        self._clock = self._chances = 0

    def units(self) -> Iterator[Unit]:
        """Yield the units that are valid in a tier, those on their way down last."""
        for tier in sorted(self.orders):
            yield from self.orders[tier].values()
        yield from (copy.unit for copy in self.moving.values() if copy.to < copy.source)

    def count_units(self) -> int:
        """Return the number of these units, without a look at each."""
        return sum(map(len, self.orders.values())) + sum(copy.to < copy.source for copy in self.moving.values())

    def numbers(self) -> dict[str, Any]:
        """Return the numbers, tables as pairs."""
        numbers = {name: getattr(self, name) for name in ("_clock", "lower", "lower_bytes")}
        return numbers | {name: [*getattr(self, name).items()] for name in _TABLES}

    def facts(self) -> Iterator[Row]:
        """Yield the facts of units and of the copies under way, in the orders of use."""
        for unit in self.units():
            yield "unit", _facts_of(unit)
            if unit.lost:
                yield "lost", unit
        for tier, copies in self.copies.items():
            yield from (("copied", tier, unit) for unit in copies.values())
        yield from (("moving", copy.unit, copy.source, copy.to, copy.nbytes, copy.age) for copy in self.moving.values())

    def touch(self, units: Iterable[Unit]) -> None:
        """Make units the youngest: they are used."""
        self._clock += 1
        for unit in units:
            unit.age = self._clock
            if valid := unit.valid:
                if unit.move is None or unit.move > unit.tier:
                    self.orders[unit.tier].move_to_end(unit.name)
                if valid & (valid - 1):  # there are copies
                    for copies in self.copies.values():
                        if unit.name in copies:
                            copies.move_to_end(unit.name)

    def add(self, unit: Unit) -> None:
        """Count a unit that is new, or was forgotten, and is used now."""
        self._clock += 1
        unit.age = self._clock
        tier = unit.tier = unit.at
        unit.valid = 1 << tier
        self.bytes[tier] = self.bytes.get(tier, 0) + (unit.nbytes if tier else unit.size(tier))
        self.orders[tier][unit.name] = unit
        if tier != unit.top:
            self.lower += 1
            self.lower_bytes += unit.size(tier)
        if self.stuck:
            self.mark_idle(unit)

    def set_valid(self, unit: Unit, valid: int) -> None:
        """Set the tiers that hold a unit's present contents."""
        was, old, changed = unit.tier, unit.valid, unit.valid ^ valid
        unit.valid = valid
        highest = unit.tier = valid.bit_length() - 1
        for tier in tiers_in(changed):
            nbytes = unit.size(tier) if valid >> tier & 1 else -unit.size(tier)
            self.bytes[tier] = self.bytes.get(tier, 0) + nbytes
        if old & (old - 1) or valid & (valid - 1):
            self._count_copies(unit, old, valid)
        if was != highest:
            if old:
                del self.orders[was][unit.name]
            if valid:
                self.orders[highest][unit.name] = unit
            for tier, sign in ((highest, 1), (was, -1)):
                if 0 <= tier != unit.top:
                    self.lower += sign
                    self.lower_bytes += sign * unit.size(tier)

    def _count_copies(self, unit: Unit, old: int, valid: int) -> None:
        for tier, copies in self.copies.items():
            was_copy, is_copy = (bits >> tier & 1 and bits >> tier != 1 for bits in (old, valid))
            if was_copy and not is_copy:
                del copies[unit.name]
                self.copy_bytes[tier] -= unit.size(tier)
            elif is_copy and not was_copy:
                copies[unit.name] = unit
                self.stuck -= {tier, HOST}  # it may go, and on disk that makes room for units in host memory
                self.copy_bytes[tier] += unit.size(tier)

    def drop(self, unit: Unit, tiers: int, out: list[Instruction], may_be_read: bool = False) -> None:
        """Give up the data of a unit in these tiers, as bits."""
        dropped = unit.valid & tiers
        self.set_valid(unit, unit.valid & ~tiers)
        for tier in tiers_in(dropped):
            self.freed[tier] = self.freed.get(tier, 0) + unit.size(tier)
            out.append(Drop(unit, tier, may_be_read))
            if tier <= HOST:
                self.unstick()  # there is room below again

    def remove(self, unit: Unit, out: list[Instruction]) -> None:
        """Give up a unit that is valid only in the tier of its use: a short way, since most units are."""
        tier, nbytes = unit.tier, unit.nbytes
        unit.valid, unit.tier = 0, -1
        self.bytes[tier] -= nbytes
        self.freed[tier] = self.freed.get(tier, 0) + nbytes
        del self.orders[tier][unit.name]
        out.append(Drop(unit, tier))
        if tier == HOST and (self.blocked or self.stuck):
            self.unstick()

    def unstick(self) -> None:
        """Try all units again."""
        self.blocked.clear()
        self.stuck.clear()
        self._chances += 1

    def block(self, unit: Unit) -> None:
        """Try no unit of this size, until :meth:`unstick`: its copy down has failed. Others are first next time."""
        self.blocked[unit.tier] = min(unit.nbytes, self.blocked.get(unit.tier, unit.nbytes))
        self.orders[unit.tier].move_to_end(unit.name)

    def limit(self, tier: int, nbytes: int) -> None:
        """Set the limit of a tier."""
        self.limits[tier] = nbytes
        self.unstick()

    def shrink(self, tier: int, nbytes: int) -> None:
        """Let ``nbytes`` of a tier go down once, whatever its limit."""
        self.stuck.discard(tier)
        self.shrunk[tier] = max(0, self.bytes.get(tier, 0) - nbytes)

    def keep(self, tier: int, nbytes: int) -> int:
        """Set the bytes that wait in a tier to be used again; return those without room beside its data."""
        self.kept[tier] = nbytes
        return self.excess(tier)

    def mark_idle(self, unit: Unit) -> None:
        """Look again at a tier with a unit that is new, has moved, or is no longer pinned: the unit may go."""
        if self.stuck and unit.tier in self.stuck and self.may_go(unit):
            self.stuck.discard(unit.tier)

    def start(self, unit: Unit, to: int, by: Waiter | None, out: list[Instruction]) -> None:
        """Begin a copy of a unit."""
        copy = Copy(unit, unit.tier, to, by, unit.size(to), unit.age)
        unit.move = to
        self.moving[unit.name] = copy
        self.bytes[to] = self.bytes.get(to, 0) + copy.nbytes
        self.coming[to] = self.coming.get(to, 0) + copy.nbytes
        if to < unit.tier:
            self.leaving[unit.tier] = self.leaving.get(unit.tier, 0) + unit.nbytes
            del self.orders[unit.tier][unit.name]
        out.append(copy)

    def end(self, copy: Copy) -> None:
        """End a copy; its result is not counted yet."""
        unit = copy.unit
        unit.move = None
        del self.moving[unit.name]
        self.bytes[copy.to] -= copy.nbytes
        self.coming[copy.to] -= copy.nbytes
        if copy.to < copy.source:
            self.leaving[copy.source] -= unit.nbytes
            self.orders[copy.source][unit.name] = unit
            self.orders[copy.source].move_to_end(unit.name, last=unit.age != copy.age)
        if copy.to == DISK:
            self.stuck.discard(HOST)  # the copy may take less than was set aside, or nothing

    def resize(self, unit: Unit, nbytes: int) -> None:
        """Change a unit's size; data on disk, or under way, still has the old size. It may fit below now."""
        more = nbytes - unit.nbytes
        if unit.valid == 1 << unit.top and unit.move is None:  # a short way for most units
            unit.nbytes, unit.disk_bytes = nbytes, 0
            self.bytes[unit.tier] += more
            if more < 0:
                self.freed[unit.tier] = self.freed.get(unit.tier, 0) - more
                if unit.tier == HOST and (self.blocked or self.stuck):
                    self.unstick()
            self.mark_idle(unit)
            return
        unit.disk_bytes = unit.size(DISK) if unit.valid >> DISK & 1 else 0
        unit.nbytes = nbytes
        for tier in tiers_in(unit.valid & ~(1 << DISK)):
            self.bytes[tier] += more
            if tier != unit.tier:
                self.copy_bytes[tier] += more
            if more < 0:
                self.freed[tier] = self.freed.get(tier, 0) - more
        if unit.valid >> HOST & 1 and more < 0:
            self.unstick()
        if HOST == unit.tier != unit.top:
            self.lower_bytes += more
        if unit.move is not None and unit.move < unit.tier:
            self.leaving[unit.tier] += more
        self.mark_idle(unit)

    def over(self, tier: int, more_bytes: int = 0) -> int:
        """Return the number of bytes that must still go down from a tier so that ``more_bytes`` fit."""
        limit = self.limits.get(tier)
        return 0 if limit is None else self._staying(tier) + more_bytes - limit

    def _staying(self, tier: int) -> int:
        return self.bytes.get(tier, 0) - self.leaving.get(tier, 0)

    def fits(self, tier: int, nbytes: int, part: float = 1.0) -> bool:
        """Tell whether ``nbytes`` fit into a tier now, or into a part of its limit."""
        limit = self.limits.get(tier)
        return limit is None or self.bytes.get(tier, 0) + nbytes <= limit * part

    @property
    def is_over(self) -> bool:
        """True if a tier has more than its limit with what it keeps, even if enough of it is leaving."""
        for tier, limit in self.limits.items():  # noqa: SIM110 - runs at each event, and is twice as fast
            if limit < self.bytes.get(tier, 0) + self.kept.get(tier, 0):
                return True
        return False

    def usage(self, tier: int) -> Usage:
        """Return the bytes of a tier; without the lock each number is of a moment of its own."""
        counts = (self.limits, self.bytes, self.copy_bytes, self.coming, self.leaving)
        return Usage(*[count.get(tier, 0) for count in counts])

    def excess(self, tier: int) -> int:
        """Return the bytes kept for reuse without room beside the data that lies in a tier; 0 or less: all have."""
        limit, kept = self.limits.get(tier), self.kept.get(tier, 0)
        if limit is None or not kept:
            return 0
        return min(kept, kept + self.bytes.get(tier, 0) - self.coming.get(tier, 0) - limit)

    def settle(self, out: list[Instruction]) -> bool:
        """Send down the bytes above the limits or that must go; return whether the disk's limit keeps some up."""
        self._refused = False
        while True:
            before = self._chances
            for tier in (*self.limits, *self.shrunk):
                self.make_room(tier, out)
            if self._chances == before:
                return self._refused  # else there is new room below, and more units may go

    def make_room(self, tier: int, out: list[Instruction], more_bytes: int = 0) -> None:
        """Send down the bytes above the limit of a tier, and the bytes that must go since it shrinks."""
        over = self.over(tier, more_bytes)
        shrinks = self._staying(tier) - self.shrunk[tier] if tier in self.shrunk else 0
        if (over > 0 or shrinks > 0) and tier not in self.stuck:
            must = max(over, shrinks)
            spare = int(self.limits[tier] * (1 - self.low)) if over > 0 else 0
            before = self._chances
            if self.send_down(tier, must, max(over + spare, shrinks), None, out) < must and self._chances == before:
                self.stuck.add(tier)

    def trim(self, out: list[Instruction]) -> None:
        """End the shrinking of tiers that cannot go further down; trim what their copies left, and what has no room."""
        for tier in tuple(self.shrunk):
            if not self.leaving.get(tier):
                del self.shrunk[tier]
                if out[-1:] != [Trim(tier)]:
                    out.append(Trim(tier))
        if (excess := self.excess(HOST)) > 0:
            self.kept[HOST] -= excess
            out.append(Trim(HOST, excess=True))

    def send_down(self, tier: int, must: int, more: int, by: Waiter | None, out: list[Instruction]) -> int:
        """Send down ``must`` bytes as the policy chooses, then the oldest up to ``more``; return the bytes."""
        sent = 0
        for unit in self._first_copies(tier, more):
            sent += unit.size(tier)
            self.drop(unit, 1 << tier, out)
        for choose, part in ((self.choose, must), (headroom, more)):  # headroom: else each value would start moves
            for c in list(choose(self.candidates(tier), part - sent)):
                sent += self._send(self.orders[tier][c.name], by, out)
        return sent

    def candidates(self, tier: int) -> Iterator[Candidate]:
        """Yield the units that may go down from a tier, longest untouched first."""
        for unit in self.orders.get(tier, {}).values() if tier != DISK else ():
            if self.may_go(unit):
                needed = 2 if unit.running else 1 if unit.waiting else 0
                soonest = min(unit.waiting.values()) if unit.waiting else ()
                yield Candidate(unit.name, unit.age, unit.nbytes, needed, unit.is_clean, soonest)

    def may_go(self, unit: Unit) -> bool:
        """Tell whether a unit may go down from its tier."""
        if unit.pins or unit.move is not None or unit.tier == DISK:
            return False
        if unit.is_clean:
            return True
        small = unit.nbytes < self.blocked.get(unit.tier, unit.nbytes + 1)
        return small and not unit.fixed and self._may_take(below(unit.tier), unit.size(below(unit.tier)))

    def _may_take(self, tier: int, nbytes: int) -> bool:
        """Tell whether a tier can take ``nbytes``; host memory always can."""
        if tier != DISK or self.fits(DISK, nbytes - self.copy_bytes[DISK]):
            return True
        self._refused = True
        return False

    def _send(self, unit: Unit, by: Waiter | None, out: list[Instruction]) -> int:
        """Send a unit down; return its bytes, or 0 if the disk has no room."""
        tier, to = unit.tier, below(unit.tier)
        if unit.is_clean:
            self.drop(unit, 1 << tier, out, may_be_read=tier > HOST)
            return unit.nbytes
        if not self._may_take(to, unit.size(to)):  # the units before it have filled the disk
            return 0
        if to == DISK and DISK in self.limits:
            for copied in self._first_copies(DISK, self.bytes.get(DISK, 0) + unit.size(DISK) - self.limits[DISK]):
                self.drop(copied, 1 << DISK, out)
        self.start(unit, to, by, out)
        return unit.nbytes

    def _first_copies(self, tier: int, nbytes: int) -> list[Unit]:
        """Return the first units with ``nbytes`` of copies in a tier: the units are also valid higher up."""
        units: list[Unit] = []
        for unit in self.copies.get(tier, {}).values():
            if nbytes <= 0:
                break
            nbytes -= unit.size(tier)
            units.append(unit)
        return units
