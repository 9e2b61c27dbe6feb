"""What the spill store's state machine instructs, by examples; its laws are in ``test_explored.py``."""

from __future__ import annotations

import pytest
from spill_worlds import Instant

from hpcgpu.spill.state import (
    DEVICE,
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
from hpcgpu.spill.state.accounting import Accounting
from hpcgpu.spill.state.machine import SpillState

FULL = OSError("No space left on device")


def units(*sizes: int, top: int = DEVICE) -> list[Unit]:
    return [Unit(i, size, top, top) for i, size in enumerate(sizes)]


def kinds(instructions: tuple[Instruction, ...]) -> list[type]:
    return [type(i) for i in instructions]


def copy_of(instructions: tuple[Instruction, ...]) -> Copy:
    (copy,) = (i for i in instructions if isinstance(i, Copy))
    return copy


def test_units_above_the_limit_go_down_least_recent_first() -> None:
    state, (a, b) = SpillState({DEVICE: 10}), units(6, 6)
    assert state.set("a", (a,)) == ()
    copy = copy_of(state.set("b", (b,)))
    assert copy == Copy(a, DEVICE, HOST, None, 6, a.age)
    assert state.moved(copy) == (Drop(a, DEVICE),)
    assert state.accounting.bytes == {DEVICE: 6, HOST: 6}


def test_units_on_their_way_down_are_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are set faster than they are copied: each event would look at all that are under way."""
    looked_at: list[Unit] = []
    may_go = Accounting.may_go
    monkeypatch.setattr(Accounting, "may_go", lambda tiers, unit: looked_at.append(unit) or may_go(tiers, unit))
    state, many = SpillState({DEVICE: 10}), units(*[1] * 500)
    copies = [c for unit in many for c in state.set(unit.name, (unit,)) if isinstance(c, Copy)]
    assert len(copies) >= 490
    assert len(looked_at) < 10 * len(many)
    for copy in copies:
        state.moved(copy)
    assert len(looked_at) < 20 * len(many)
    assert state.accounting.bytes == {DEVICE: 500 - len(copies), HOST: len(copies)}


def test_reader_of_a_unit_going_down_does_not_wait() -> None:
    state, (a, b) = SpillState({DEVICE: 10}), units(6, 6)
    state.set("a", (a,))
    down = copy_of(state.set("b", (b,)))
    reader = Ticket((a,))
    assert state.need(reader)[0] == Resume(reader)
    assert Drop(a, DEVICE) not in state.moved(down)
    assert a.tier == DEVICE and a.is_clean


def test_a_way_up_goes_above_the_limit_where_nothing_can_go() -> None:
    state, (a,) = SpillState({DEVICE: 5}), units(6)
    state.moved(copy_of(state.set("a", (a,))))
    reader = Ticket((a,))
    assert state.moved(copy_of(state.need(reader))) == (Resume(reader),)
    assert state.release(reader) == (Drop(a, DEVICE, may_be_read=True),)


def test_peer_gets_host_bytes_without_the_device() -> None:
    state, (a,) = SpillState({DEVICE: 5, HOST: 5}), units(6)
    state.moved(copy_of(state.moved(copy_of(state.set("a", (a,))))))
    assert a.tier == DISK
    peer = Ticket((a,), for_peer=True)
    up = copy_of(state.need(peer))
    assert (up.source, up.to) == (DISK, HOST)
    assert state.moved(up) == (Resume(peer),)


def test_a_full_disk_is_said_once_and_tried_again_at_a_tick() -> None:
    state, (a, b) = SpillState({HOST: 5}), units(6, 7, top=HOST)
    down = copy_of(state.set("a", (a,)))
    said = state.failed(down, FULL)
    assert said == (Say("stays", HOST, 6, FULL),)
    assert state.set("b", (b,)) == () and state.is_stuck  # it is bigger
    assert kinds(state.tick()) == [Copy, Copy]


def test_what_is_smaller_than_what_failed_is_tried_at_once() -> None:
    state, (a, b) = SpillState({HOST: 5}), units(6, 3, top=HOST)
    state.failed(copy_of(state.set("a", (a,))), FULL)
    assert copy_of(state.set("b", (b,))).unit is b


def test_what_cannot_be_pickled_stays_for_good() -> None:
    state, (a,) = SpillState({HOST: 5}), units(6, top=HOST)
    error = TypeError("cannot pickle")
    assert state.failed(copy_of(state.set("a", (a,))), error, for_good=True) == (Say("immovable", HOST, 6, error),)
    assert state.tick() == () and not state.is_stuck


def test_disk_limit_holds_is_logged_and_copies_make_room() -> None:
    store, (a, b) = Instant({HOST: 10, DISK: 6}), units(6, 6, top=HOST)
    store.set(a, b)
    assert (a.tier, b.tier) == (DISK, HOST)
    store.use(a)  # b cannot go: the disk is full of a, until a is up
    assert [unit.tier for unit in (a, b)].count(DISK) == 1
    assert store.state.accounting.bytes[DISK] <= 6
    c = Unit(2, 9, HOST, HOST)
    store.set(c)
    assert [(say.event, say.error) for say in store.told if isinstance(say, Say)] == [("stays", None)]


def test_failed_read_back_fails_readers_and_worker_leaves_once() -> None:
    state, (a,) = SpillState({HOST: 5}), units(6, top=HOST)
    state.moved(copy_of(state.set("a", (a,))))
    lost, first, second = OSError("Input/output error"), Ticket((a,)), Ticket((a,))
    up = copy_of(state.need(first))
    assert state.failed(up, lost, for_good=True) == (Leave(a, lost), Fail(first, lost))
    assert state.need(second) == (Fail(second, lost),)


def test_an_allocation_that_failed_goes_on_when_enough_has_gone() -> None:
    state, (a, b) = SpillState({}), units(6, 6)
    state.set("a", (a,))
    state.set("b", (b,))
    room = FailedAllocation(DEVICE, 10)
    first, second = state.alloc_failed(room)
    assert isinstance(first, Copy) and isinstance(second, Copy) and first.by is room
    assert state.moved(first) == (Drop(first.unit, DEVICE),)
    assert state.moved(second) == (Drop(second.unit, DEVICE), Resume(room))


def test_an_allocation_fails_when_nothing_can_go() -> None:
    state, (a,) = SpillState({}), units(6)
    state.set("a", (a,))
    state.need(Ticket((a,)))
    room = FailedAllocation(DEVICE, 1)
    assert state.alloc_failed(room) == (Fail(room, None),)


def test_shrinking_frees_idle_memory_then_moves_data() -> None:
    state, (a, b) = SpillState({HOST: 100}), units(6, 6, top=HOST)
    state.set("a", (a,))
    state.set("b", (b,))
    release, copy = state.shrink(HOST, 5)
    assert isinstance(copy, Copy) and release == Trim(HOST)
    assert state.moved(copy) == (Drop(copy.unit, HOST), Trim(HOST))


def test_what_the_next_task_needs_comes_up_while_nobody_waits() -> None:
    state, (a, b) = SpillState({DEVICE: 10}), units(6, 6)
    state.set("a", (a,))
    state.moved(copy_of(state.set("b", (b,))))
    assert state.expect("task", ["a"], (0,), running=False) == ()  # no room, and nothing moves for it
    drop, up = state.delete("b")
    assert drop == Drop(b, DEVICE)
    assert up == Copy(a, HOST, DEVICE, None, 6, a.age)
    reader = Ticket((a,))
    assert state.need(reader) == ()
    assert state.moved(up) == (Resume(reader),)
    state.release(reader)
    assert state.task_over("task") == ()


def test_a_failed_prefetch_is_not_tried_again_before_a_tick() -> None:
    state, (a, b) = SpillState({DEVICE: 10}), units(6, 6)
    state.set("a", (a,))
    state.moved(copy_of(state.set("b", (b,))))
    state.expect("task", ["a"], (0,), running=False)
    up = copy_of(state.delete("b"))
    assert state.failed(up, MemoryError()) == () and state.is_stuck
    assert copy_of(state.tick()).unit is a


def test_only_the_next_few_tasks_are_looked_at_in_their_order() -> None:
    state, there = SpillState({DEVICE: 50}), units(*[10] * 6)
    for unit in there:
        unit.at = HOST
        state.set(unit.name, (unit,))
    ups = [state.expect(i, [i], (6 - i,), running=False) for i in range(6)]
    assert [copy_of(up).unit.name for up in ups if up] == [0]  # one at a time
    order = [0]
    copy = copy_of(ups[0])
    while out := state.moved(copy):
        copy = copy_of(out)
        order.append(copy.unit.name)
    assert order == [0, 5, 4, 3]  # four fit below the limit


def test_unit_without_a_key_is_not_needed_and_copies_end_once() -> None:
    state, (a,) = SpillState({DEVICE: 5}), units(6)
    with pytest.raises(ValueError, match="no key names"):
        state.need(Ticket((a,)))
    copy = copy_of(state.set("a", (a,)))
    state.moved(copy)
    with pytest.raises(ValueError, match="under way"):
        state.moved(copy)
    with pytest.raises(ValueError, match="not up"):
        state.grow(a, 7)
