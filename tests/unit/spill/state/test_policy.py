"""Which units go down: by examples, and by laws of the choice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spill_worlds import Instant

from hpcgpu.spill.state import DEVICE, HOST, Candidate, Unit, headroom, victims
from hpcgpu.spill.state.accounting import Choice

RUNS, READY = 2, 1


def unit(age: int, nbytes: int, needed: int = 0, *, clean: bool = False) -> Candidate:
    return Candidate(age, age, nbytes, needed, clean)


def twins(*sizes: int) -> list[Candidate]:
    """Return candidates touched together."""
    return [Candidate(i, 1, nbytes) for i, nbytes in enumerate(sizes)]


EXAMPLES: dict[str, tuple[list[Candidate], int, list[int]]] = {
    "nothing to do": ([unit(1, 10)], 0, []),
    "nothing there": ([], 10, []),
    "the oldest": ([unit(1, 10), unit(2, 10), unit(3, 10)], 15, [1, 2]),
    "all, where that is not enough": ([unit(1, 10), unit(2, 10)], 99, [1, 2]),
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


@st.composite
def streams(draw: st.DrawFn) -> list[Candidate]:
    """Draw candidates, longest untouched first; those that are ready have a priority."""
    small = st.integers(0, 3)
    facts = draw(st.lists(st.tuples(small, st.integers(1, 20), small, st.booleans(), small), max_size=15))
    return [
        Candidate(i, age, nbytes, min(needed, 2), clean, (turn,) if needed == READY else ())
        for i, (age, nbytes, needed, clean, turn) in enumerate(sorted(facts, key=lambda f: f[0]))
    ]


NEEDS = st.integers(-5, 200)


def nbytes(candidates: list[Candidate]) -> int:
    return sum(c.nbytes for c in candidates)


def rank(c: Candidate) -> tuple[float, ...]:
    """Return when its turn to go comes."""
    return (c.needed, *(-p for p in c.priority), c.age)


@given(streams(), NEEDS)
def test_the_need_is_covered_by_what_goes_first(candidates: list[Candidate], need: int) -> None:
    """Nothing younger goes than plain LRU would take; what is needed sooner goes later; of two alike the older goes."""
    chosen = list(victims(candidates, need))
    assert len({c.name for c in chosen}) == len(chosen)
    assert set(chosen) <= set(candidates)
    assert nbytes(chosen) >= min(need, nbytes(candidates))
    assert [c.needed for c in chosen] == sorted(c.needed for c in chosen)
    for c in chosen:
        assert nbytes([b for b in candidates if rank(b) < rank(c)]) < need
    for stays, goes in ((a, b) for a in candidates if a not in chosen for b in chosen):
        is_older = stays.name < goes.name and stays._replace(name=goes.name, age=goes.age) == goes
        is_clean = stays.clean and not goes.clean and stays.nbytes == goes.nbytes and stays[3::2] == goes[3::2]
        assert not is_older
        assert not is_clean or rank(stays) > rank(goes)


@given(streams(), streams(), NEEDS)
def test_nothing_is_needless(clean: list[Candidate], dirty: list[Candidate], need: int) -> None:
    chosen = list(victims([*clean, *(c._replace(name=c.name + len(clean)) for c in dirty)], need))
    assert all(nbytes(chosen) - c.nbytes < need for c in chosen)


@given(streams(), NEEDS)
def test_a_clean_group_goes_before_anything_is_copied(candidates: list[Candidate], need: int) -> None:
    clean = [c for c in candidates if c.clean]
    chosen = list(victims(sorted(candidates, key=lambda c: not c.clean), need))
    if any(not c.clean for c in chosen):
        assert nbytes([c for c in clean if not c.needed]) < need


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(1, 200))
def test_of_one_age_one_is_taken_where_one_is_enough(sizes: list[int], need: int) -> None:
    chosen = [c.nbytes for c in victims(twins(*sizes), need)]
    enough = [n for n in sizes if n >= need]
    assert chosen == [min(enough)] if enough else chosen[0] == max(sizes)


@given(st.integers(1, 500))
def test_no_more_is_looked_at_than_what_covers_the_need(need: int) -> None:
    """Of each two, one is needed."""
    seen = 0

    def endless() -> Iterator[Candidate]:
        nonlocal seen
        for seen in count(1):  # noqa: B007 (the test reads it)
            yield unit(seen, 10, READY if seen % 2 else 0)

    assert nbytes(list(victims(endless(), need))) - need < 10
    assert seen <= 2 * (-(-need // 10) + 1)


def test_headroom_ends_at_what_is_too_big_or_needed() -> None:
    assert [c.name for c in headroom([unit(1, 3), unit(3, 3), unit(4, 9)], 10)] == [1, 3]
    assert [c.name for c in headroom([unit(1, 3), unit(2, 3, READY), unit(3, 3)], 10)] == [1]


# --- on repeated use, with the state machine and copies that end at once ---


def lru(candidates: Iterable[Candidate], need_bytes: int) -> Iterator[Candidate]:
    for candidate in candidates:
        if need_bytes <= 0:
            return
        need_bytes -= candidate.nbytes
        yield candidate


def uploads_of_forty_uses(choose: Choice) -> int:
    """Use two arrays in turn that have been down once, beside cold ones that leave room for one of the two."""
    store = Instant({DEVICE: 10_000}, choose)
    hot, cold = [Unit(0, 1500), Unit(1, 1500)], [Unit(i, 1000) for i in range(2, 10)]
    store.set(*hot, *cold, Unit(10, 1000), Unit(11, 1000))
    assert [unit.tier for unit in hot] == [HOST, HOST]
    for key in (10, 11):
        store.run(store.state.delete(key))
    for i in range(40):
        store.use(hot[i % 2])
    return store.up // 1500


def test_what_is_used_again_and_again_comes_up_once() -> None:
    assert uploads_of_forty_uses(victims) == uploads_of_forty_uses(lru) == 2


@st.composite
def loops(draw: st.DrawFn) -> tuple[list[Unit], list[Unit], int, bool]:
    """Draw what is used again and again, what is not, a limit with room for the first, and which was there before."""
    sizes = st.sampled_from((1, 2, 3, 5, 7, 10, 30))
    hot, cold = draw(st.lists(sizes, min_size=1, max_size=6)), draw(st.lists(sizes, max_size=8))
    return (
        [Unit(i, size) for i, size in enumerate(hot)],
        [Unit(len(hot) + i, size) for i, size in enumerate(cold)],
        sum(hot) + draw(st.integers(0, 12)),
        draw(st.booleans()),
    )


def rounds(case: tuple[list[Unit], list[Unit], int, bool], choose: Choice, low: float) -> list[int]:
    """Return the bytes that have been moved after each of six rounds."""
    hot, cold, limit, hot_first = case
    store = Instant({DEVICE: limit}, choose, low)
    hot, cold = ([Unit(u.name, u.nbytes) for u in units] for units in (hot, cold))
    store.set(*(hot + cold if hot_first else cold + hot))
    moved = []
    for _ in range(6):
        for used in hot:
            store.use(used)
        moved.append(store.up + store.down)
    return moved


@given(loops())
def test_no_more_is_moved_than_by_lru_on_repeated_use(case: tuple[list[Unit], list[Unit], int, bool]) -> None:
    assert rounds(case, victims, 1.0)[-1] <= rounds(case, lru, 1.0)[-1]


@given(loops())
def test_with_headroom_nothing_moves_any_more_soon(case: tuple[list[Unit], list[Unit], int, bool]) -> None:
    """Headroom costs at most its own bytes, twice, and only at the beginning."""
    moved = rounds(case, victims, 0.9)
    assert moved[1] == moved[-1]
    assert moved[-1] <= rounds(case, lru, 1.0)[-1] + 2 * (case[2] - int(0.9 * case[2]) + 1)
