"""Every order in which requests to the spill store's state machine may come, and its copies end or fail.

A world is a machine, what it has instructed, and what lies where: contents have versions, so that it is seen when a
reader gets old ones. A story says what may happen, each part of it once and at any time. ``explore`` goes through all
worlds that it can lead to, breadth first: what it finds is found by a shortest path.
"""

import pickle
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

from hpcgpu.spill.state.instructions import (
    DEVICE,
    DISK,
    HOST,
    Answer,
    Copy,
    Drop,
    FailedAllocation,
    Instruction,
    Ticket,
    Unit,
    below,
)
from hpcgpu.spill.state.machine import SpillState
from hpcgpu.spill.state.victims import Candidate, victims

Action = tuple[Any, ...]
Choice = Callable[[Iterable[Candidate], int], Iterable[Candidate]]


def holds(condition: object, law: str) -> None:
    if not condition:
        raise AssertionError(law)


@dataclass(frozen=True)
class Story:
    """What may happen to units.

    ``units`` are their bytes, their tops, and where they lie at first if not there; a key of each unit's number names
    it, and all are there when the story begins.
    ``parts`` are actions, each once: ``("need", unit, ...)``, ``("write", unit, ...)``, ``("peer", unit, ...)``,
    ``("urgent", unit, ...)`` from within a copy down, ``("use", unit)`` at once and to write to it,
    ``("delete", key)``, ``("set", key, unit, ...)``, ``("grow", unit, nbytes)``, ``("leave", unit, nbytes)``,
    ``("join", key, unit, nbytes)`` with the key that names what joins,
    ``("alloc", tier, nbytes)``,
    ``("shrink", tier, nbytes)``, ``("limit", tier, nbytes)``, ``("kept", tier, nbytes)``,
    ``("expect", task, running, key, ...)``, ``("task_over", task)``, ``("tick",)``. Copies end as they like;
    ``failures`` of them fail, ``losses`` for good.
    """

    units: tuple[tuple[int, ...], ...]
    parts: tuple[Action, ...]
    limits: dict[int, int] = field(default_factory=lambda: {DEVICE: 10, HOST: 10})
    failures: int = 0
    losses: int = 0
    gives_up: bool = False


@dataclass
class Reader:
    """A ticket, and what has become of it."""

    ticket: Ticket
    is_told: bool = False
    has_failed: bool = False


class World:
    """A machine and its surroundings."""

    def __init__(self, story: Story) -> None:
        self.state = SpillState(story.limits)
        self.units = [Unit(i, nbytes, top, *(at or [top])) for i, (nbytes, top, *at) in enumerate(story.units)]
        self.copies: list[Copy] = []
        self.captured: list[int] = []  # the versions that these copies have taken
        self.version = [0 for _ in self.units]
        self.contents: list[dict[int, int]] = [{} for _ in self.units]
        self.readers: list[Reader] = []
        self.allocations: list[FailedAllocation] = []
        self.todo = list(range(len(story.parts)))
        self.keys: dict[Any, tuple[Unit, ...]] = {}
        self.failures, self.losses, self.gives_up = story.failures, story.losses, story.gives_up
        for i, unit in enumerate(self.units):
            self.contents[i][unit.at] = 0
            self.carry_out(self.name(i, unit))

    # --- what may happen now ------------------------------------------------------------------------------------------
    def actions(self, story: Story) -> Iterator[Action]:
        for i, copy in enumerate(self.copies):
            yield "moved", i
            if self.failures:
                yield "failed", i, False
            if self.losses and (copy.to < copy.source or copy.source == DISK):
                yield "failed", i, True
        for i, reader in enumerate(self.readers):
            if reader.is_told or self.gives_up:
                yield "release", i
        if self.gives_up:
            yield from (("give_up", i) for i in range(len(self.allocations)))
        for i in self.todo:
            if self.is_possible(story.parts[i]):
                yield "part", i, *story.parts[i]

    def is_possible(self, part: Action) -> bool:
        if part[0] in ("need", "write", "peer", "urgent"):
            return all(self.units[i].keys for i in part[1:])
        if part[0] in ("grow", "use"):
            return self.units[part[1]].tier == self.units[part[1]].top
        if part[0] == "join":
            unit = self.units[part[2]]
            return unit.valid == 1 << unit.at and unit.move is None
        if part[0] == "leave":
            return self.units[part[1]].keys and part[2] < self.units[part[1]].nbytes
        return part[0] != "delete" or part[1] in self.keys

    def do(self, action: Action) -> None:
        if action[0] == "part":
            self.todo.remove(action[1])
            action = action[2:]
        call = getattr(self, f"do_{action[0]}", None) or getattr(self.state, action[0])  # shrink, limit, tick
        self.carry_out(call(*action[1:]))
        self.check()

    def do_moved(self, i: int) -> Any:
        copy, version = self.copies.pop(i), self.captured.pop(i)
        self.contents[copy.unit.name][copy.to] = version
        return self.state.moved(copy, copy.unit.nbytes - 1 if copy.to == DISK else 0)

    def do_failed(self, i: int, for_good: bool) -> Any:
        copy = self.copies.pop(i)
        self.captured.pop(i)
        self.failures, self.losses = self.failures - (not for_good), self.losses - for_good
        return self.state.failed(copy, OSError("no"), for_good)

    def do_need(self, *units: int, writes: bool = False, for_peer: bool = False, at_once: bool = False) -> Any:
        ticket = Ticket(tuple(self.units[i] for i in units), writes, for_peer, at_once=at_once)
        self.readers.append(Reader(ticket))
        return self.state.need(ticket)

    def do_write(self, *units: int) -> Any:
        return self.do_need(*units, writes=True)

    def do_urgent(self, *units: int) -> Any:
        return self.do_need(*units, at_once=True)

    def do_peer(self, *units: int) -> Any:
        return self.do_need(*units, for_peer=True)

    def write(self, i: int, tier: int) -> Unit:
        """Give a unit new contents in a tier."""
        self.version[i] += 1
        self.contents[i][tier] = self.version[i]
        return self.units[i]

    def do_use(self, i: int) -> Any:
        return self.state.used((self.write(i, self.units[i].top),), writes=True)

    def do_release(self, i: int) -> Any:
        reader = self.readers.pop(i)
        if reader.ticket.writes and reader.is_told and not reader.has_failed:
            for unit in reader.ticket.units:
                self.write(unit.name, unit.top)
        return self.state.release(reader.ticket)

    def do_set(self, key: int, *units: int) -> Any:
        for i in units:
            if not self.units[i].valid:
                self.contents[i] = {}
                self.write(i, self.units[i].at)
        return self.name(key, *(self.units[i] for i in units))

    def do_delete(self, key: int) -> Any:
        return self.state.delete(self.keys.pop(key))

    def name(self, key: int, *units: Unit) -> Any:
        """Let a key name these units, in place of those before."""
        old, self.keys[key] = self.keys.get(key, ()), units
        return (*self.state.set(units), *(self.state.delete(old) if old else ()))

    def do_grow(self, i: int, nbytes: int) -> Any:
        return self.state.grow(self.write(i, self.units[i].top), nbytes)

    def do_join(self, key: int, i: int, nbytes: int) -> Any:
        unit = self.write(i, self.units[i].at)
        self.state.join(unit, Unit(-1, nbytes))
        return self.name(key, unit)

    def do_leave(self, unit: int, nbytes: int) -> Any:
        part = Unit(-1, nbytes)
        part.keys = 1
        return self.state.leave(self.units[unit], part)

    def do_alloc(self, tier: int, nbytes: int) -> Any:
        self.allocations.append(FailedAllocation(tier, nbytes))
        return self.state.alloc_failed(self.allocations[-1])

    def do_give_up(self, i: int) -> Any:
        return self.state.alloc_given_up(self.allocations.pop(i))

    def do_expect(self, task: str, running: bool, *keys: int) -> Any:
        units = [unit for key in keys for unit in self.keys.get(key, ())]
        return self.state.expect(task, units, (0,), running)

    # --- what is instructed -------------------------------------------------------------------------------------------
    def carry_out(self, instructions: Any) -> None:
        for do in instructions:
            if isinstance(do, Copy):
                self.start(do)
            elif isinstance(do, Drop):
                holds(not do.unit.valid >> do.tier & 1, "what is valid is not given up")
                used = any(do.unit in r.ticket.units and not r.ticket.for_peer for r in self.readers if r.is_told)
                holds(not used or do.tier != do.unit.top, "what is used is not taken away")
                holds(self.contents[do.unit.name].pop(do.tier, None) is not None, "what is not there is not given up")
            elif isinstance(do, Answer):
                self.tell(do)

    def start(self, copy: Copy) -> None:
        unit = copy.unit
        holds(all(c.unit is not unit for c in self.copies), "one copy of a unit at a time")
        holds(copy.source in self.contents[unit.name], "a copy starts from what is there")
        holds(copy.to > copy.source or not unit.pins, "a pinned unit starts no copy down")
        ahead = copy.by is None and copy.to > copy.source
        holds(
            not ahead or all([*(r.is_told for r in self.readers), not self.allocations]),
            "nothing comes up ahead of needs",
        )
        holds(not ahead or self.state._accounting.fits(copy.to, 0), "nothing comes up ahead where there is no room")
        self.copies.append(copy)
        self.captured.append(self.contents[unit.name][copy.source])

    def tell(self, do: Answer) -> None:
        if isinstance(do.waiter, FailedAllocation):
            holds(do.waiter in self.allocations, "an allocation is told once")
            self.allocations.remove(do.waiter)
            return
        reader = next((r for r in self.readers if r.ticket is do.waiter), None)
        assert reader is not None, "a reader that has gone is not told"
        holds(not reader.is_told, "a reader is told once")
        reader.is_told, reader.has_failed = True, do.error is not None
        for unit in do.waiter.units if do.error is None else ():
            tier = unit.tier if do.waiter.for_peer else unit.top
            version = self.contents[unit.name].get(tier)
            holds(version is not None and tier >= HOST, "a reader is resumed when its units are up")
            holds(version == self.version[unit.name], "a reader gets present contents")

    # --- what holds always --------------------------------------------------------------------------------------------
    def check(self) -> None:
        for law in broken(self.state, self.units, [r.ticket for r in self.readers], self.copies):
            raise AssertionError(law)
        for unit, contents, version in zip(self.units, self.contents, self.version, strict=True):
            for tier in (DISK, HOST, unit.top):
                if unit.valid >> tier & 1:
                    holds(contents.get(tier) == version, "what is valid are the present contents")
        holds(self.state._accounting.fits(DISK, 0), "the disk's limit holds")
        holds(self.state._accounting.excess(HOST) <= 0, "data and kept buffers are within the limit together")
        if not self.copies:
            self.check_quiet()

    def check_quiet(self) -> None:
        tiers = self.state._accounting
        holds(not tiers.shrunk, "shrinking ends")
        holds(all(r.is_told for r in self.readers) and not self.allocations, "nobody waits when nothing is under way")
        for tier, order in tiers.orders.items():
            stuck = tiers.over(tier) > 0 and (tiers.copies.get(tier) or any(tiers.may_go(u) for u in order.values()))
            holds(not stuck, "what is above a limit goes down, if it can")

    def key(self) -> Any:
        """Return what tells this world from others; ages count only as an order."""
        state, tiers = self.state, self.state._accounting
        units = tuple(
            (u.nbytes, u.valid, u.keys, u.move, u.dirty, u.fixed, bool(u.lost), bool(u.waiting), u.running)
            for u in self.units
        )
        copies = tuple(
            sorted(
                (c.unit.name, c.to, c.by is None, c.age == c.unit.age, v == self.version[c.unit.name])
                for c, v in zip(self.copies, self.captured, strict=True)
            )
        )
        readers = tuple(
            (tuple(u.name for u in t.units), t.writes, t.for_peer, t.at_once, t.missing, r.is_told, r.has_failed)
            for r in self.readers
            for t in (r.ticket,)
        )
        orders = tuple((tier, tuple(o)) for tier, o in tiers.orders.items() if o)
        queues = tuple((p, tuple(u.name for u in q)) for p, q in state._coming_up.items() if q)
        rooms = tuple((r.tier, r.until_bytes - tiers.freed.get(r.tier, 0)) for r in self.allocations)
        by_place = tuple(tuple(d.items()) for d in (tiers.blocked, tiers.shrunk, tiers.limits, tiers.kept))
        rest = by_place, tuple(sorted(tiers.stuck)), tuple(sorted(state.stays)), state.pauses
        aliases = tuple(sorted((k, tuple(u.name for u in us)) for k, us in self.keys.items()))
        state_key = (units, copies, readers, orders, queues, rooms, rest, aliases)
        return (*state_key, tuple(self.todo), self.failures, self.losses)


@dataclass
class Found:
    """How far an exploration came; ``broken`` is a law, and ``path`` the actions that led there."""

    worlds: int = 0
    quiet: int = 0
    broken: str = ""
    path: tuple[Action, ...] = ()


def explore(story: Story) -> Found:
    """Go through all worlds of a story."""
    found = Found()
    first = World(story)
    first.check()
    seen = {first.key(): 0}
    after: dict[int, set[int]] = {}  # by world, those to which copies alone lead
    queue: deque[tuple[bytes, tuple[Any, ...]]] = deque([(pickle.dumps(first, 5), ())])
    number = 0
    while queue:
        frozen, path = queue.popleft()
        world = pickle.loads(frozen)
        found.quiet += not world.copies
        for action in tuple(world.actions(story)):
            world = world or pickle.loads(frozen)
            try:
                world.do(action)
            except Exception as e:
                found.broken, found.path = f"{type(e).__name__}: {e}", (*path, action)
                return found
            if (key := world.key()) not in seen:
                seen[key] = len(seen)
                queue.append((pickle.dumps(world, 5), (*path, action)))
            if action[0] == "moved":
                after.setdefault(number, set()).add(seen[key])
            world = None
        number += 1
        found.worlds = len(seen)
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        found.broken = "copies alone never come to an end"
    return found


def broken(
    state: SpillState, units: Collection[Unit], tickets: Collection[Ticket], under_way: Collection[Copy]
) -> Iterator[str]:
    """Yield the laws that a state between two events breaks; ``units`` are all that ever had a name."""
    yield from _bytes(state, units, under_way)
    for unit in units:
        yield from _unit(unit, [copy for copy in under_way if copy.unit is unit], tickets)
    for copy in under_way:
        yield from _copy(copy)
    for tier in state.stays:
        if tier not in state._accounting.blocked and state._accounting.fits(tier, 0):
            yield f"tier {tier} is said to stay above its limit, and has room"
    waiting = [t for t in tickets if not t.over]
    for unit in (unit for t in waiting if t.at_once for unit in t.units if t.lacks(unit)):
        if unit.move is None:
            yield f"unit {unit.name} waits for room, and a copy down waits for it"
    if state.waiting != len(waiting):
        yield f"{state.waiting} tickets are said to wait, and {len(waiting)} do"
    if not under_way and (waiting or state.allocations):
        yield "somebody waits, and nothing is under way"


def _bytes(state: SpillState, units: Collection[Unit], under_way: Collection[Copy]) -> Iterator[str]:
    tiers = {*state._accounting.bytes, *(c.to for c in under_way)}
    for tier in tiers:
        valid = sum(u.size(tier) for u in units if u.valid >> tier & 1)
        coming = sum(c.nbytes for c in under_way if c.to == tier)
        leaving = sum(c.unit.nbytes for c in under_way if c.source == tier > c.to)
        copies = sum(u.size(tier) for u in units if u.valid >> tier & 1 and u.tier > tier)
        if state._accounting.bytes.get(tier, 0) != valid + coming:
            yield f"{state._accounting.bytes.get(tier, 0)} bytes are counted in tier {tier}, {valid + coming} are valid"
        if state._accounting.coming.get(tier, 0) != coming:
            yield f"{state._accounting.coming.get(tier, 0)} bytes are said to come to tier {tier}, {coming} do"
        if state._accounting.leaving.get(tier, 0) != leaving:
            yield f"{state._accounting.leaving.get(tier, 0)} bytes are said to leave tier {tier}, {leaving} do"
        if state._accounting.copy_bytes.get(tier, copies) != copies:
            yield f"{state._accounting.copy_bytes[tier]} bytes of copies are counted in tier {tier}, {copies} are valid"


def _unit(unit: Unit, copies: list[Copy], tickets: Collection[Ticket]) -> Iterator[str]:
    if unit.tier != unit.valid.bit_length() - 1:
        yield f"unit {unit.name} is said to lie in tier {unit.tier}, and is valid in {unit.valid:b}"
    if unit.keys and not unit.valid:
        yield f"unit {unit.name} is named, and nowhere"
    if unit.valid and not (unit.keys or unit.pins or copies):
        yield f"unit {unit.name} is needed by nobody, and still there"
    if len(copies) != (unit.move is not None):
        yield f"unit {unit.name} has {len(copies)} copies under way, and says {unit.move}"
    for copy in copies:
        if copy.source != unit.tier:
            yield f"unit {unit.name} is copied from tier {copy.source}, and lies in {unit.tier}"
    if unit.dirty and unit.valid != 1 << unit.top:
        yield f"unit {unit.name} is dirty, and has copies"
    if unit.pins != sum(unit in t.units for t in tickets):
        yield f"unit {unit.name} has {unit.pins} pins"


def _copy(copy: Copy) -> Iterator[str]:
    unit, is_down = copy.unit, copy.to < copy.source
    if copy.to != (below(copy.source) if is_down else unit.top if copy.source == HOST else HOST):
        yield f"unit {unit.name} is copied from tier {copy.source} to {copy.to}, which is not the next one"
    if is_down and isinstance(copy.by, Ticket):
        yield f"unit {unit.name} goes down in the thread of a reader, which may wait for room"


class Instant:
    """Carries out what the machine instructs."""

    def __init__(self, limits: Mapping[int, int], choose: Choice = victims, low: float = 0.95) -> None:
        self.state = SpillState(limits)
        self.state._accounting.choose, self.state._accounting.low = choose, low
        self.up = self.down = 0
        self.told: list[Instruction] = []
        self.copies: Counter[Unit] = Counter()

    def run(self, instructions: Iterable[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            do = todo.popleft()
            if not isinstance(do, Copy):
                self.told.append(do)
                continue
            self.copies[do.unit] += 1
            if do.to > do.source:
                self.up += do.unit.nbytes
            else:
                self.down += do.unit.nbytes
            todo.extend(self.state.moved(do))

    def set(self, *units: Unit) -> None:
        """Let each unit have a key, its name."""
        for unit in units:
            self.run(self.state.set((unit,)))

    def use(self, *units: Unit, writes: bool = False) -> None:
        """Use units as a task does."""
        ticket = Ticket(units, writes)
        self.run(self.state.need(ticket))
        self.run(self.state.release(ticket))
