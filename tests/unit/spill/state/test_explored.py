"""The laws of the spill store's state machine, in every order of events, and in many orders with more units."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from spill_worlds import Story, World, explore

from hpcgpu.spill.state import DEVICE, DISK, HOST

D, H = DEVICE, HOST
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
    "units that lose a part": Story(ABC, (("leave", 0, 3), ("need", 0), ("leave", 2, 2), ("alloc", D, 6)), failures=1),
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
    assert found.worlds > 500 and found.quiet > 50, found  # else the story shows nothing


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


@settings(max_examples=60, phases=[Phase.generate])  # a story is read sooner than it is made smaller
@given(stories(), st.integers(0, 1 << 32))
def test_machine_with_many_units_keeps_the_laws(story: Story, seed: int) -> None:
    for walks in range(15):
        walk(story, random.Random(seed + walks))
