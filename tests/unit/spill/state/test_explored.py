"""The laws of the spill store's state machine, in every order of events, and in many orders with more units."""

from __future__ import annotations

import inspect
import random
import textwrap
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from spill_worlds import Story, World, explore

from hpcgpu.spill.state.accounting import Accounting
from hpcgpu.spill.state.machine import SpillState as S
from hpcgpu.spill.state.units import DEVICE, DISK, HOST
from hpcgpu.spill.state.waits import FailedAllocations, Unspills

D, H, LOSE_A_PART = DEVICE, HOST, "units that lose a part"
# two units on a device with room for one, and one unit in host memory, which has no room for two
ABC = ((6, D), (6, D), (6, H))
STORIES = {
    "readers": Story(ABC, (("need", 0, 1), ("need", 0), ("need", 2)), failures=1),
    "copies that fail twice": Story(ABC, (("need", 0, 2), ("need", 1), ("tick",)), failures=2),
    "writers": Story(ABC, (("write", 0), ("need", 0), ("peer", 0, 1), ("delete", 0)), failures=1),
    "writers, one after the other": Story(ABC, (("write", 0), ("write", 0, 1), ("need", 2))),
    "urgent readers": Story(ABC, (("urgent", 0), ("need", 1), ("urgent", 2))),
    "urgent behind others": Story(((6, D), (6, D), (6, D)), (("need", 0), ("need", 1), ("urgent", 2))),
    "users at once": Story(ABC, (("use", 0), ("need", 1), ("need", 0)), failures=1),
    "keys that share units": Story(ABC, (("set", 1, 0), ("delete", 0), ("set", 3, 1), ("write", 1)), failures=1),
    "lost units": Story(
        ABC, (("need", 0, 1), ("need", 0), ("peer", 0)), {D: 10, H: 6}, failures=0, losses=1, gives_up=True
    ),
    "allocations that fail": Story(ABC, (("need", 0), ("alloc", D, 6), ("alloc", D, 8), ("delete", 1)), failures=1),
    "allocations that are given up": Story(
        ABC, (("need", 0), ("alloc", D, 6), ("alloc", D, 8), ("delete", 1)), gives_up=True
    ),
    "limits that shrink": Story(ABC, (("shrink", H, 6), ("limit", D, 4), ("need", 0)), failures=1),
    "a full disk": Story(ABC, (("need", 2), ("need", 0), ("delete", 1), ("write", 0)), {D: 10, H: 6, DISK: 8}),
    "a unit that grows": Story(ABC, (("grow", 0, 8), ("need", 0), ("grow", 2, 7)), failures=1),
    LOSE_A_PART: Story(ABC, (("leave", 0, 3), ("need", 0), ("leave", 2, 2), ("alloc", D, 6)), failures=1),
    "units that get more": Story(
        ABC, (("join", 3, 0, 3), ("need", 0), ("join", 4, 2, 2), ("delete", 1), ("write", 2)), failures=1
    ),
    "expected tasks": Story(
        ((5, D), (6, D), (6, H)),
        (("expect", "t", False, 0), ("expect", "s", True, 0), ("need", 2), ("delete", 1), ("task_over", "t")),
        {D: 10, H: 8},
        failures=1,
    ),
    "readers that give up behind another": Story(
        ((9, D, H), (9, D, H), (9, D), (9, H)),
        (("need", 0), ("need", 1), ("need", 1), ("limit", H, 20)),
        {D: 10, H: 40},
        gives_up=True,
    ),
    "two devices": Story(
        ((6, D), (6, D + 1), (6, D + 1)),
        (("need", 0, 1), ("need", 2), ("alloc", D + 1, 6), ("limit", D, 4)),
        {D: 10, D + 1: 10, H: 10},
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_machine_in_every_order_keeps_the_laws(story: Story) -> None:
    found = explore(story)
    assert not found.broken, (found.broken, *found.path)
    assert found.is_all
    assert found.worlds > 500 and found.quiet > 50, found  # else the story shows nothing


# A planted bug: the function, the right text, the wrong text, and the story that shows it.
MUTANTS: dict[str, tuple[Any, str, str, str]] = {
    "a pinned unit goes down": (Accounting.may_go, "unit.pins or ", "", "readers"),
    "a unit has two copies under way": (Accounting.may_go, "unit.move is not None or ", "", "readers"),
    "a dirty unit counts as clean": (
        S._spoil,
        "accounting.drop(unit, unit.valid & ~(1 << unit.top), out)",
        "accounting",
        "writers",
    ),
    "a copy counts after a write": (S._moved_down, "if is_used and unit.dirty:", "if False:", "writers"),
    "a unit used meanwhile goes": (S._moved_down, " or unit.age != copy.age", "", "writers"),
    "a unit in use is taken away": (S._moved_down, "unit.pins > 0 or unit.age != copy.age", "False", "readers"),
    "a failed copy stays counted": (Accounting.end, "self.bytes[copy.to] -= copy.nbytes", "pass", "readers"),
    "a unit is forgotten while it moves": (S._forget, "unit.move is None and ", "", "keys that share units"),
    "a failure reaches no reader": (S.failed, "self._end(ticket, Fail(ticket, error), out)", "pass", "readers"),
    "a reader is answered twice": (S.failed, "if not ticket.over:", "if True:", "copies that fail twice"),
    "a reader is resumed too early": (S.need, "ticket.missing = len(missing)", "ticket.missing = 1", "readers"),
    "a unit stops halfway up": (S._proceed, "self.unspills.add(unit)", "pass", "readers"),
    "a way up waits for ever": (Unspills._start, " and self._accounting.leaving.get(to)", "", "readers"),
    "a copy down waits for another": (Unspills._start, " and not _is_urgent(unit)", "", "urgent readers"),
    "an urgent reader comes last": (Unspills.add, "appendleft if _is", "append if _is", "urgent behind others"),
    "a unit used at once stays clean": (S.used, "self._spoil(unit, out)", "pass", "users at once"),
    "a part that left stays counted": (Accounting.resize, "self.bytes[tier] += more", "pass", LOSE_A_PART),
    "a part that left is still leaving": (Accounting.resize, "self.leaving[unit.tier] += more", "pass", LOSE_A_PART),
    "a part that left frees a disk": (
        Accounting.resize,
        "unit.size(DISK) if unit.valid >> DISK & 1 else 0",
        "0",
        LOSE_A_PART,
    ),
    "a copy leaves a tier out": (Unspills._start, " or _above(unit) != to", "", "readers that give up behind another"),
    "a warning is never withdrawn": (S._settled, "self.stays.discard(tier)", "pass", "copies that fail twice"),
    "an allocation waits for ever": (FailedAllocations.serve, " or not leaving", "", "allocations that fail"),
    "the disk exceeds its limit": (Accounting._may_take, "tier != DISK or ", "True or ", "a full disk"),
    "a failure is final": (Accounting.settle, "self._chances == before", "True", "readers"),
    "a released unit is not looked at": (S.release, "self.accounting.mark_idle(unit)", "pass", "readers"),
    "prefetch does not yield": (
        S._continue,
        "not self.waiting and not self.allocations.waiting",
        "True",
        "expected tasks",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_explore_with_a_planted_bug_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, right, wrong, story = MUTANTS[name]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1
    names: dict[str, Any] = {}
    exec(source.replace(right, wrong), function.__globals__, names)
    owner = getattr(inspect.getmodule(function), function.__qualname__.split(".")[0])
    monkeypatch.setattr(owner, function.__name__, names[function.__name__])
    found = explore(STORIES[story], at_most=6000)
    assert found.broken, f"not found in {found.worlds} worlds"
    assert found.path


@st.composite
def stories(draw: st.DrawFn) -> Story:
    units = draw(st.lists(st.tuples(st.integers(2, 9), st.sampled_from((D, D, D + 1, H))), min_size=4, max_size=8))
    one = st.integers(0, len(units) - 1)
    few = st.lists(one, min_size=1, max_size=3, unique=True)
    tier, nbytes = st.sampled_from((D, D + 1, H)), st.integers(1, 20)
    parts = draw(
        st.lists(
            st.one_of(
                st.tuples(st.sampled_from(("need", "need", "write", "peer")), few).map(lambda p: (p[0], *p[1])),
                st.tuples(st.just("set"), st.integers(0, 9), few).map(lambda p: (*p[:2], *p[2])),
                st.tuples(st.just("delete"), one),
                st.tuples(st.just("grow"), one, st.integers(9, 12)),
                st.tuples(st.just("leave"), one, st.integers(1, 4)),
                st.tuples(st.just("join"), st.integers(0, 9), one, st.integers(1, 4)),
                st.tuples(st.just("alloc"), st.sampled_from((D, D + 1)), nbytes),
                st.tuples(st.sampled_from(("shrink", "limit")), tier, nbytes),
                st.tuples(st.just("expect"), st.sampled_from("tu"), st.booleans(), one, one),
                st.tuples(st.just("task_over"), st.sampled_from("tu")),
                st.just(("tick",)),
            ),
            min_size=5,
            max_size=25,
        )
    )
    limits = draw(st.fixed_dictionaries({D: nbytes, H: nbytes}, optional={D + 1: nbytes, DISK: nbytes}))
    return Story(
        tuple(units), tuple(parts), limits, draw(st.integers(0, 3)), draw(st.integers(0, 1)), draw(st.booleans())
    )


def walk(story: Story, choose: random.Random) -> None:
    """Go one way through a story, then delete all and see that nothing is left."""
    world, in_turn = World(story), choose.random()
    world.check()
    while actions := list(world.actions(story)):
        world.do(actions[0] if choose.random() < in_turn else choose.choice(actions))
    for key in list(world.state.keys):
        world.do(("delete", key))
    while world.copies:
        world.do(("moved", 0))
    assert not any(world.state.accounting.bytes.values())
    assert not any(world.contents)


@settings(max_examples=120, phases=[Phase.generate])  # a story is read sooner than it is made smaller
@given(stories(), st.integers(0, 1 << 32))
def test_machine_with_many_units_keeps_the_laws(story: Story, seed: int) -> None:
    for walks in range(15):
        walk(story, random.Random(seed + walks))
