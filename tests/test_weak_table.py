"""What a weak table forgets, and what it keeps."""

from __future__ import annotations

from hpcgpu.spill.weak import WeakTable


class Thing:
    """Something that can be referred to weakly."""


def test_what_nothing_refers_to_is_forgotten() -> None:
    table: WeakTable[str, Thing] = WeakTable()
    one = table["one"] = Thing()
    assert table.get("one") is one
    assert table.get("two") is None
    del one
    assert table.get("one") is None
    assert not table._refs


def test_the_end_of_a_predecessor_leaves_the_successor() -> None:
    table: WeakTable[str, Thing] = WeakTable()
    first = table["key"] = Thing()
    second = table["key"] = Thing()
    del first
    assert table.get("key") is second


def test_what_has_two_keys_is_forgotten_under_both() -> None:
    table: WeakTable[int, Thing] = WeakTable()
    thing = table[1] = table[2] = Thing()
    assert table.get(1) is table.get(2) is thing
    del thing
    assert not table._refs
