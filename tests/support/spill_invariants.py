"""The laws of every state of the machine, read from the state itself; the tests assert them after each event."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hpcgpu.spill.state.machine import SpillState
from hpcgpu.spill.state.units import HOST, Copy, Ticket, Unit, below


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
        if tier not in state.accounting.blocked and state.accounting.fits(tier, 0):
            yield f"tier {tier} is said to stay above its limit, and has room"
    waiting = [t for t in tickets if not t.over]
    for unit in (unit for t in waiting if t.at_once for unit in t.units if t.lacks(unit)):
        if unit.move is None:
            yield f"unit {unit.name} waits for room, and a copy down waits for it"
    if state.waiting != len(waiting):
        yield f"{state.waiting} tickets are said to wait, and {len(waiting)} do"
    if not under_way and (waiting or state.allocations.waiting):
        yield "somebody waits, and nothing is under way"


def _bytes(state: SpillState, units: Collection[Unit], under_way: Collection[Copy]) -> Iterator[str]:
    tiers = {*state.accounting.bytes, *(c.to for c in under_way)}
    for tier in tiers:
        there = sum(u.size(tier) for u in units if u.valid >> tier & 1)
        coming = sum(c.nbytes for c in under_way if c.to == tier)
        leaving = sum(c.unit.nbytes for c in under_way if c.source == tier > c.to)
        copies = sum(u.size(tier) for u in units if u.valid >> tier & 1 and u.tier > tier)
        if state.accounting.bytes.get(tier, 0) != there + coming:
            yield f"{state.accounting.bytes.get(tier, 0)} bytes are counted in tier {tier}, {there + coming} are there"
        if state.accounting.leaving.get(tier, 0) != leaving:
            yield f"{state.accounting.leaving.get(tier, 0)} bytes are said to leave tier {tier}, {leaving} do"
        if state.accounting.copy_bytes.get(tier, copies) != copies:
            yield f"{state.accounting.copy_bytes[tier]} bytes of copies are counted in tier {tier}, {copies} are there"


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
