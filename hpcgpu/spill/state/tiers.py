"""How much lies where, in which order it was used, and what goes down: the accounting of the state machine."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from hpcgpu.spill.state.policy import Candidate, headroom, victims
from hpcgpu.spill.state.units import DISK, HOST, Copy, Drop, Instruction, Release, Room, Ticket, Unit, below, places_in

Choice = Callable[[Iterable[Candidate], int], Iterable[Candidate]]
_Order = OrderedDict[int, Unit]


class Tiers:
    """All units by place. OrderedDict, since a plain dict is quadratic at its old end (docs/facts/spill.md).

    Pure: SpillState makes it, and shares it with its Ups and Rooms. Single numbers are read without the store's lock.

    Parameters
    ----------
    limits : mapping of int to int
        Bytes by place; a place without one has no limit.
    low : float
        Moving down begins above a limit and goes on to this part of it.
    choose : callable
        Takes candidates, longest untouched first, and bytes; returns what goes.

    Attributes
    ----------
    bytes : dict
        By place, what is valid there or under way to it.
    leaving : dict
        By place, what is under way down from it, as long as it still lies there.
    orders : dict
        Units by their highest place, longest untouched first; without those on their way down, of which there may be
        as many as there are units, and which may not go.
    copies : dict
        Units that are higher up and have a valid copy in this place.
    freed : dict
        By place, bytes that were given up there so far.
    blocked : dict
        By place, the size from which on copies down from it fail, until something changes.
    stuck : set
        Places above their limit from which nothing more may go, until something changes: a full disk must not make
        each event look at a million units.
    shrunk : dict
        By place, down to where it is to go once.
    refused : bool
        Something that should go to disk just now stays in host memory, since the disk's limit is reached.
    lower, lower_bytes : int
        How many units are not where they are used, and what they take where they lie.

    """

    def __init__(self, limits: Mapping[int, int], low: float = 0.95, choose: Choice = victims) -> None:
        self.limits, self.low, self._choose = dict(limits), low, choose
        self.bytes: dict[int, int] = {}
        self.leaving: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        self.blocked: dict[int, int] = {}
        self.stuck: set[int] = set()
        self.shrunk: dict[int, int] = {}
        self.orders: dict[int, _Order] = defaultdict(OrderedDict)
        self.copies: dict[int, _Order] = {HOST: OrderedDict(), DISK: OrderedDict()}
        self.copy_bytes = {HOST: 0, DISK: 0}
        self.lower = self.lower_bytes = self._clock = self._chances = 0
        self.refused = False

    def touch(self, units: Iterable[Unit]) -> None:
        """Note that units are used."""
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

    def postpone(self, unit: Unit) -> None:
        """Try others first next time."""
        self.orders[unit.tier].move_to_end(unit.name)

    def add(self, unit: Unit) -> None:
        """Count a unit that is new, or was forgotten, and is used now."""
        self._clock += 1
        unit.age = self._clock
        place = unit.tier = unit.at
        unit.valid = 1 << place
        self.bytes[place] = self.bytes.get(place, 0) + unit.size(place)
        self.orders[place][unit.name] = unit
        if place != unit.top:
            self.lower += 1
            self.lower_bytes += unit.size(place)

    def place(self, unit: Unit, valid: int) -> None:
        """Note which places hold a unit's present contents from now on."""
        was, old, changed = unit.tier, unit.valid, unit.valid ^ valid
        unit.valid = valid
        tier = unit.tier = valid.bit_length() - 1
        for place in places_in(changed):
            nbytes = unit.size(place) if valid >> place & 1 else -unit.size(place)
            self.bytes[place] = self.bytes.get(place, 0) + nbytes
        if old & (old - 1) or valid & (valid - 1):
            self._note_copies(unit, old, valid)
        if was != tier:
            if old:
                del self.orders[was][unit.name]
            if valid:
                self.orders[tier][unit.name] = unit
            for at, sign in ((tier, 1), (was, -1)):
                if 0 <= at != unit.top:
                    self.lower += sign
                    self.lower_bytes += sign * unit.size(at)

    def _note_copies(self, unit: Unit, old: int, valid: int) -> None:
        for place, copies in self.copies.items():
            was_copy, is_copy = (bits >> place & 1 and bits >> place != 1 for bits in (old, valid))
            if was_copy and not is_copy:
                del copies[unit.name]
                self.copy_bytes[place] -= unit.size(place)
            elif is_copy and not was_copy:
                copies[unit.name] = unit
                self.stuck -= {place, HOST}  # it may make way, also on disk for what is in host memory
                self.copy_bytes[place] += unit.size(place)

    def drop(self, unit: Unit, places: int, out: list[Instruction]) -> None:
        """Give up what these places, as bits, hold of a unit."""
        gone = unit.valid & places
        self.place(unit, unit.valid & ~places)
        for place in places_in(gone):
            self.freed[place] = self.freed.get(place, 0) + unit.size(place)
            out.append(Drop(unit, place))
            if place <= HOST:
                self.unblock()  # there is room below again

    def unblock(self) -> None:
        """Let everything be tried again."""
        self.blocked.clear()
        self.stuck.clear()
        self._chances += 1

    def note_idle(self, unit: Unit) -> None:
        """Note that a unit is new, has moved, or is pinned no more: it may be one that can go."""
        if self.stuck and unit.tier in self.stuck and self.may_go(unit):
            self.stuck.discard(unit.tier)

    def start(self, unit: Unit, to: int, by: Ticket | Room | None, out: list[Instruction]) -> None:
        """Begin a copy of a unit."""
        copy = Copy(unit, unit.tier, to, by, unit.size(to), unit.age)
        unit.move = to
        self.bytes[to] = self.bytes.get(to, 0) + copy.nbytes
        if to < unit.tier:
            self.leaving[unit.tier] = self.leaving.get(unit.tier, 0) + unit.nbytes
            del self.orders[unit.tier][unit.name]
        out.append(copy)

    def end(self, copy: Copy) -> None:
        """Note that a copy is under way no more; what it made is not counted yet."""
        unit = copy.unit
        unit.move = None
        self.bytes[copy.to] -= copy.nbytes
        if copy.to < copy.source:
            self.leaving[copy.source] -= unit.nbytes
            self.orders[copy.source][unit.name] = unit
            self.orders[copy.source].move_to_end(unit.name, last=unit.age != copy.age)
        if copy.to == DISK:
            self.stuck.discard(HOST)  # it may take less than was set aside, or nothing

    def resize(self, unit: Unit, nbytes: int) -> None:
        """Note that a unit takes another number of bytes; what is on disk, or under way, is of the old ones."""
        more, unit.disk_bytes = nbytes - unit.nbytes, unit.size(DISK) if unit.valid >> DISK & 1 else 0
        unit.nbytes = nbytes
        for place in places_in(unit.valid & ~(1 << DISK)):
            self.bytes[place] += more
            if place != unit.tier:
                self.copy_bytes[place] += more
            if more < 0:
                self.freed[place] = self.freed.get(place, 0) - more
        if unit.valid >> HOST & 1 and more < 0:
            self.unblock()
        if HOST == unit.tier != unit.top:
            self.lower_bytes += more
        if unit.move is not None and unit.move < unit.tier:
            self.leaving[unit.tier] += more

    def over(self, place: int, more_bytes: int = 0) -> int:
        """Return how much more must go down from a place, so that ``more_bytes`` fit in its limit."""
        limit = self.limits.get(place)
        return 0 if limit is None else self._staying(place) + more_bytes - limit

    def _staying(self, place: int) -> int:
        return self.bytes.get(place, 0) - self.leaving.get(place, 0)

    def fits(self, place: int, nbytes: int, part: float = 1.0) -> bool:
        """Tell whether something fits in a place now, or in a part of its limit."""
        limit = self.limits.get(place)
        return limit is None or self.bytes.get(place, 0) + nbytes <= limit * part

    @property
    def is_over(self) -> bool:
        """Whether a place has more than its limit, also if enough of it is leaving."""
        for place, limit in self.limits.items():  # noqa: SIM110 - asked at each event, and twice as fast
            if limit < self.bytes.get(place, 0):
                return True
        return False

    def settle(self, out: list[Instruction]) -> None:
        """Send down what is above the limits, or must go since a place shrinks."""
        while True:
            before = self._chances
            for place in (*self.limits, *self.shrunk):
                self.make_room(place, out)
            if self._chances == before:
                return  # else room was made below, and what did not go before may go now

    def make_room(self, place: int, out: list[Instruction], more_bytes: int = 0) -> None:
        """Send down what is above the limit of a place, or must go since it shrinks."""
        over = self.over(place, more_bytes)
        shrinks = self._staying(place) - self.shrunk[place] if place in self.shrunk else 0
        if (over > 0 or shrinks > 0) and place not in self.stuck:
            must = max(over, shrinks)
            spare = int(self.limits[place] * (1 - self.low)) if over > 0 else 0
            before = self._chances
            if self.send_down(place, must, max(over + spare, shrinks), None, out) < must and self._chances == before:
                self.stuck.add(place)

    def end_shrinking(self, out: list[Instruction]) -> None:
        """Note which places have gone down as far as they can, and give back what the copies have left there."""
        for place in tuple(self.shrunk):
            if not self.leaving.get(place):
                del self.shrunk[place]
                if out[-1:] != [Release(place)]:
                    out.append(Release(place))

    def send_down(self, place: int, must: int, more: int, by: Room | None, out: list[Instruction]) -> int:
        """Send down ``must`` bytes as the policy chooses, then the longest untouched up to ``more``; return the bytes.

        The second part is only headroom, so that not each new value sets moves going.
        """
        gone = 0
        for unit in self._first_copies(place, more):
            gone += unit.size(place)
            self.drop(unit, 1 << place, out)
        for chosen, part in ((self._choose, must), (headroom, more)):
            for c in list(chosen(self.candidates(place), part - gone)):
                gone += self._go(self.orders[place][c.name], by, out)
        return gone

    def candidates(self, place: int) -> Iterator[Candidate]:
        """Yield what may go down from a place, longest untouched first."""
        if place != DISK:
            for unit in self.orders.get(place, {}).values():
                if self.may_go(unit):
                    needed = 2 if unit.running else 1 if unit.waiting else 0
                    soonest = min(unit.waiting.values()) if unit.waiting else ()
                    yield Candidate(unit.name, unit.age, unit.nbytes, False, needed, unit.is_clean, soonest)

    def may_go(self, unit: Unit) -> bool:
        """Tell whether a unit may go down from where it is."""
        if unit.pins or unit.move is not None or unit.tier == DISK:
            return False
        if unit.is_clean:
            return True
        small = unit.nbytes < self.blocked.get(unit.tier, unit.nbytes + 1)
        return small and not unit.fixed and self._may_take(below(unit.tier), unit.size(below(unit.tier)))

    def _may_take(self, place: int, nbytes: int) -> bool:
        """Tell whether a place can take this; host memory can always."""
        if place != DISK or self.fits(DISK, nbytes - self.copy_bytes[DISK]):
            return True
        self.refused = True
        return False

    def _go(self, unit: Unit, by: Room | None, out: list[Instruction]) -> int:
        place, to = unit.tier, below(unit.tier)
        if unit.is_clean:
            self.drop(unit, 1 << place, out)
            return unit.nbytes
        if not self._may_take(to, unit.size(to)):  # what went before it has filled the disk
            return 0
        if to == DISK and DISK in self.limits:
            for copied in self._first_copies(DISK, self.bytes.get(DISK, 0) + unit.size(DISK) - self.limits[DISK]):
                self.drop(copied, 1 << DISK, out)
        self.start(unit, to, by, out)
        return unit.nbytes

    def _first_copies(self, place: int, nbytes: int) -> list[Unit]:
        """Return whose copies in a place go first: they are also higher up."""
        found: list[Unit] = []
        for unit in self.copies.get(place, {}).values():
            if nbytes <= 0:
                break
            nbytes -= unit.size(place)
            found.append(unit)
        return found
