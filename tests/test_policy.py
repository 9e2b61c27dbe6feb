"""Which units go down: by examples, and by laws of what is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.spill.policy import Candidate, victims, victims_of

RUNS, READY = 2, 1


def unit(age: int, nbytes: int, needed: int = 0, *, pinned: bool = False, clean: bool = False) -> Candidate:
    return Candidate(age, age, nbytes, pinned, needed, clean)


def twins(*sizes: int) -> list[Candidate]:
    """Return candidates touched together."""
    return [Candidate(i, 1, nbytes) for i, nbytes in enumerate(sizes)]


EXAMPLES: dict[str, tuple[list[Candidate], int, list[int]]] = {
    "nothing to do": ([unit(1, 10)], 0, []),
    "nothing there": ([], 10, []),
    "the oldest": ([unit(1, 10), unit(2, 10), unit(3, 10)], 15, [1, 2]),
    "all, where that is not enough": ([unit(1, 10), unit(2, 10)], 99, [1, 2]),
    "never what is pinned": ([unit(1, 10, pinned=True), unit(2, 10)], 99, [2]),
    "what no task needs": ([unit(1, 10, READY), unit(2, 10, RUNS), unit(3, 10)], 10, [3]),
    "what is ready before what runs": ([unit(1, 10, RUNS), unit(2, 10, READY), unit(3, 10)], 20, [3, 2]),
    "what runs where all is needed": ([unit(1, 10, RUNS), unit(2, 10, READY), unit(3, 10)], 30, [3, 2, 1]),
    "a clean one as old as the others": ([unit(1, 10), unit(2, 10, clean=True), unit(3, 10)], 20, [2, 1]),
    "a clean one of the window": ([unit(1, 4), unit(2, 10, clean=True)], 10, [2]),
    "no clean one that is younger": ([unit(1, 10), unit(2, 10, clean=True)], 10, [1]),
    "of one age the biggest": (twins(10, 30, 20), 35, [1, 0]),
    "of one age the smallest that is enough": (twins(100, 5, 20, 30), 15, [2]),
    "not a small one that a later one makes needless": ([unit(1, 1), unit(2, 100)], 50, [2]),
    "of two of which one is needless the older": ([unit(1, 10), unit(2, 10), unit(3, 100, READY)], 105, [1, 3]),
    "an old one, however big": ([unit(1, 100), unit(2, 10)], 5, [1]),
    "of one size the oldest": ([unit(1, 10), unit(2, 5), unit(3, 10)], 21, [1, 3, 2]),
}


@pytest.mark.parametrize(("candidates", "need", "names"), EXAMPLES.values(), ids=EXAMPLES)
def test_chosen(candidates: list[Candidate], need: int, names: list[int]) -> None:
    assert [c.name for c in victims(candidates, need)] == names


def test_of_what_is_ready_the_last_to_run_goes_first() -> None:
    turns = [(0.0, 1, 7), (0.0, 2, 3), (0.0, 1, 9)]
    ready = [Candidate(i, i, 10, needed=READY, priority=turn) for i, turn in enumerate(turns)]
    assert [c.name for c in victims(ready, 20)] == [1, 2]


def test_a_group_of_clean_ones_goes_before_older_ones() -> None:
    clean = [unit(8, 10, clean=True), unit(9, 10, RUNS, clean=True)]
    dirty = [unit(1, 10), unit(2, 10)]
    assert [c.name for c in victims_of([clean, dirty], 10)] == [8]
    assert [c.name for c in victims_of([clean, dirty], 20)] == [8, 1]
    assert [c.name for c in victims_of([clean, dirty], 40)] == [8, 1, 2, 9]


@st.composite
def streams(draw: st.DrawFn) -> list[Candidate]:
    """Draw candidates, longest untouched first; those that are ready have a priority."""
    small = st.integers(0, 3)
    facts = draw(
        st.lists(st.tuples(small, st.integers(1, 20), st.booleans(), small, st.booleans(), small), max_size=15)
    )
    return [
        Candidate(i, age, nbytes, pinned, min(needed, 2), clean, (turn,) if needed == READY else ())
        for i, (age, nbytes, pinned, needed, clean, turn) in enumerate(sorted(facts, key=lambda f: f[0]))
    ]


NEEDS = st.integers(-5, 200)


def nbytes(candidates: list[Candidate]) -> int:
    return sum(c.nbytes for c in candidates)


def movable(candidates: list[Candidate]) -> list[Candidate]:
    return [c for c in candidates if not c.pinned]


def rank(c: Candidate) -> tuple[float, ...]:
    """Return when its turn to go comes."""
    return (c.needed, *(-p for p in c.priority), c.age)


@given(streams(), NEEDS)
def test_the_need_is_covered_by_what_is_not_pinned(candidates: list[Candidate], need: int) -> None:
    chosen = list(victims(candidates, need))
    assert len({c.name for c in chosen}) == len(chosen)
    assert set(chosen) <= set(movable(candidates))
    assert nbytes(chosen) >= min(need, nbytes(movable(candidates)))


@given(streams(), streams(), NEEDS)
def test_nothing_is_needless(clean: list[Candidate], dirty: list[Candidate], need: int) -> None:
    groups = [clean, [c._replace(name=c.name + len(clean)) for c in dirty]]
    chosen = list(victims_of(groups, need))
    assert all(nbytes(chosen) - c.nbytes < need for c in chosen)


@given(streams(), NEEDS)
def test_nothing_goes_while_what_goes_before_it_is_enough(candidates: list[Candidate], need: int) -> None:
    """So nothing younger than plain LRU would take, and nothing needed while the rest suffices."""
    for c in victims(candidates, need):
        assert nbytes([b for b in movable(candidates) if rank(b) < rank(c)]) < need


@given(streams(), NEEDS)
def test_of_two_alike_the_older_goes(candidates: list[Candidate], need: int) -> None:
    chosen = set(victims(candidates, need))
    for old, young in ((a, b) for a in movable(candidates) for b in chosen if a.name < b.name):
        if old._replace(name=young.name, age=young.age) == young:
            assert old in chosen


@given(streams(), NEEDS)
def test_of_two_in_the_window_the_clean_one_goes(candidates: list[Candidate], need: int) -> None:
    chosen = set(victims(candidates, need))
    for clean, dirty in ((a, b) for a in movable(candidates) for b in chosen if a.clean and not b.clean):
        if rank(clean) <= rank(dirty) and clean.nbytes == dirty.nbytes and clean[4::2] == dirty[4::2]:
            assert clean in chosen


@given(streams(), NEEDS)
def test_a_clean_group_goes_before_anything_is_copied(candidates: list[Candidate], need: int) -> None:
    clean = [c for c in candidates if c.clean]
    chosen = list(victims_of([clean, [c for c in candidates if not c.clean]], need))
    if any(not c.clean for c in chosen):
        assert nbytes([c for c in movable(clean) if not c.needed]) < need


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(1, 200))
def test_of_one_age_one_is_taken_where_one_is_enough(sizes: list[int], need: int) -> None:
    chosen = [c.nbytes for c in victims(twins(*sizes), need)]
    enough = [n for n in sizes if n >= need]
    assert chosen == [min(enough)] if enough else chosen[0] == max(sizes)


@given(streams(), NEEDS)
def test_what_is_needed_sooner_is_moved_later(candidates: list[Candidate], need: int) -> None:
    needed = [c.needed for c in victims(candidates, need)]
    assert needed == sorted(needed)


@given(st.integers(1, 500))
def test_no_more_is_looked_at_than_what_covers_the_need(need: int) -> None:
    """Of each three, one is pinned and one needed."""
    seen = 0

    def endless() -> Iterator[Candidate]:
        nonlocal seen
        for seen in count(1):  # noqa: B007 (the test reads it)
            yield unit(seen, 10, READY if seen % 3 == 1 else 0, pinned=seen % 3 == 2)

    assert nbytes(list(victims(endless(), need))) - need < 10
    assert seen <= 3 * (-(-need // 10) + 1)


def test_a_group_is_not_looked_at_while_those_before_it_are_enough() -> None:
    def never() -> Iterator[Candidate]:
        pytest.fail("looked at")
        yield

    assert [c.name for c in victims_of([(unit(i, 10) for i in count()), never()], 20)] == [0, 1]
