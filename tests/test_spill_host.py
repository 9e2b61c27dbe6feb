"""What lies in host memory counts by allocation, goes to disk together, and comes back as it was."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgpu.spill import GpuSpillBuffer, pickled
from hpcgpu.spill.disk import Disk
from hpcgpu.spill.owners import held_by

KIB = 1024
WHOLE = 800 * KIB
SMALL = 2 * KIB  # what is left of values without their arrays, and pickles


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GpuSpillBuffer]:
    """A store whose host tier is never full: only ``evict`` sends something to disk."""
    made = GpuSpillBuffer(0, None, str(tmp_path))
    yield made
    made.close()


def to_disk(store: GpuSpillBuffer) -> None:
    while store.tiers["host"]:
        before = store.tiers["host"]
        store.evict()
        assert store.settle(10)
        if store.tiers["host"] == before:
            break
    assert store.tiers["disk"] > 0


def argument(store: GpuSpillBuffer, key: Any) -> Any:
    """A key as the argument of a task."""
    with store.handing_out_handles():
        value = store[key]
    with store.using([key]):
        return value.resolve() if hasattr(value, "resolve") else value


def whole() -> np.ndarray:
    return np.arange(WHOLE // 8, dtype="i8").reshape(80, -1)


VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "a slice": lambda x: x[10:20],
    "columns": lambda x: x[:, 5:9],
    "transposed": lambda x: x.T,
    "backwards": lambda x: x[::-2],
    "of another type": lambda x: x.view("u1"),
    "a view of a view": lambda x: x[3:][::2],
    "in a list": lambda x: [x[:40], {"other": x[40:]}],
    "of bytes": lambda x: np.frombuffer(memoryview(x).cast("B"), "i8", count=100, offset=8),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_counts_as_what_it_keeps_alive(store: GpuSpillBuffer, view: Callable[[np.ndarray], Any]) -> None:
    store["view"] = view(whole())
    assert WHOLE <= store.tiers["host"] < WHOLE + SMALL


def test_all_views_of_one_array_count_once_and_go_down_once(store: GpuSpillBuffer) -> None:
    x = whole()
    store["whole"] = x
    for i in range(8):
        store["part", i] = x[10 * i : 10 * (i + 1)]
    store["list"] = [x[5:25], x[60:]]
    store["again"] = store["list"][0]
    assert WHOLE <= store.tiers["host"] < WHOLE + 2 * SMALL
    expected = x.copy()
    del x
    to_disk(store)
    assert WHOLE <= store.tiers["disk"] < WHOLE + 2 * SMALL
    assert WHOLE <= store.counters["host_to_disk"].nbytes < WHOLE + 2 * SMALL
    for i in range(8):
        np.testing.assert_array_equal(argument(store, ("part", i)), expected[10 * i : 10 * (i + 1)])
    np.testing.assert_array_equal(argument(store, "list")[1], expected[60:])
    assert WHOLE <= store.tiers["host"] < WHOLE + 2 * SMALL
    assert store.counters["disk_to_host"].nbytes < WHOLE + 2 * SMALL


def test_of_a_big_array_only_what_a_key_shows_is_written(store: GpuSpillBuffer) -> None:
    x = whole()
    store["one"], store["column"] = x[3], x[:, 7]
    for i in range(40):
        store["gone", i] = x[i]
    for i in range(40):
        del store["gone", i]
    expected = x.copy()
    del x
    assert WHOLE <= store.tiers["host"] < WHOLE + SMALL
    to_disk(store)
    assert store.tiers["disk"] < WHOLE / 40
    np.testing.assert_array_equal(argument(store, "one"), expected[3])
    np.testing.assert_array_equal(argument(store, "column"), expected[:, 7])
    assert store.tiers["host"] < WHOLE / 40  # the big array is gone


def test_what_somebody_still_waits_for_is_written_though_its_key_is_gone(store: GpuSpillBuffer) -> None:
    x = whole()
    store["a"], store["b"] = x[:10], x[10:20]
    expected = x.copy()
    del x
    to_disk(store)
    with store.handing_out_handles():
        handle = store["a"]  # a peer asked for it
    del store["a"]
    assert argument(store, "b")[0, 0] == expected[10, 0]
    to_disk(store)
    np.testing.assert_array_equal(handle.resolve(), expected[:10])


def test_writing_to_one_view_is_seen_in_the_others_after_the_disk(store: GpuSpillBuffer) -> None:
    x = whole()
    store["whole"], store["part"] = x, x[5:8]
    del x
    to_disk(store)
    assert argument(store, "part")[0, 0] == 5 * 1280  # now there is a copy on disk
    gc.collect()
    store["part"][...] = 7  # as get_worker().data["part"]
    to_disk(store)
    assert (argument(store, "part") == 7).all()


ORDERS: dict[str, tuple[int, ...]] = {
    "the owner first": (0, 1, 2, 0),
    "its views first": (1, 2, 0, 0),
    "twice each": (0, 0, 1, 1, 0),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_in_whatever_order_an_array_and_its_views_come(store: GpuSpillBuffer, order: tuple[int, ...]) -> None:
    x = np.arange(512.0)  # 4 KiB, its own memory
    names = (x, x[100:200], x[::-1])
    expected = [name.copy() for name in names]
    for key, which in enumerate(order):
        store[key] = names[which]
    assert store.tiers["host"] == x.nbytes
    del x, names
    to_disk(store)
    assert store.counters["host_to_disk"].number == 1
    found = [argument(store, key) for key in range(len(order))]
    for value, which in zip(found, order, strict=True):
        np.testing.assert_array_equal(value, expected[which])
    assert store.counters["disk_to_host"].number == 1
    again = [key for key, which in enumerate(order) if which == order[-1]]
    assert len({id(found[key]) for key in again}) == 1
    store["stored again"] = found[-1]
    before = store.counters["host_to_disk"].number
    del found, value
    to_disk(store)
    assert store.counters["host_to_disk"].number == before  # the copy on disk is still clean


def test_an_address_that_is_used_again_is_another_array(store: GpuSpillBuffer) -> None:
    for i in range(200):
        store["one"] = np.full(512, float(i))
        store["two"] = store["one"]
        del store["one"]
        if i % 50 == 0:
            to_disk(store)
        assert (argument(store, "two") == i).all()
        assert len(store) == 1
    assert sum(store.tiers.values()) <= 4 * KIB + SMALL


def test_a_key_set_to_its_own_value_counts_once(store: GpuSpillBuffer) -> None:
    x = np.arange(512.0)
    for _ in range(3):
        store["x"] = x
    assert store.tiers["host"] == x.nbytes
    del store["x"]
    assert sum(store.tiers.values()) == 0


def test_the_parts_of_a_shuffle_are_one(store: GpuSpillBuffer) -> None:
    """What dask.dataframe's split gives: a dict of slices of one frame, and a key for each."""
    frame = pd.DataFrame({f"c{i}": np.arange(10_000.0) for i in range(10)})
    parts = {i: frame.iloc[100 * i : 100 * (i + 1)] for i in range(100)}
    held = sum(held_by(frame).values())
    assert 800_000 <= held < 1_700_000
    del frame
    store["split"] = parts
    for i in range(100):
        store["part", i] = parts[i]
    del parts
    assert held <= store.tiers["host"] < held + 100 * SMALL
    before = store.tiers["host"]
    to_disk(store)
    assert store.tiers["disk"] < before
    for i in range(0, 100, 9):
        part = argument(store, ("part", i))
        assert (len(part), part.c3.iloc[0], part.index[-1]) == (100, 100.0 * i, 100 * i + 99)
    assert (argument(store, "split")[42].c9 == argument(store, ("part", 42)).c9).all()


FRAMES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda n: pd.DataFrame({"a": np.arange(n), "b": np.arange(n) / 2, "c": np.arange(n)}),
    "text": lambda n: pd.DataFrame({"a": [f"text {i}" for i in range(n)]}),
    "objects": lambda n: pd.DataFrame({"a": pd.Series([("tuple", i) for i in range(n)], dtype=object)}),
    "dates": lambda n: pd.DataFrame(
        {"a": pd.date_range("2020", periods=n), "b": pd.Categorical(["x", "y"] * (n // 2))}
    ),
    "missing": lambda n: pd.DataFrame({"a": pd.array([1, None] * (n // 2), dtype="Int64")}),
    "series": lambda n: pd.Series(np.arange(n), index=np.arange(n) * 2, name="s"),
}


@pytest.mark.parametrize("make", FRAMES.values(), ids=FRAMES)
def test_frames_of_all_kinds_come_back(store: GpuSpillBuffer, make: Callable[[int], Any]) -> None:
    frame = make(10_000)
    assert sum(held_by(frame).values()) >= 8 * 10_000
    assert sum(held_by(frame[:10]).values()) >= 8 * 10_000
    store["whole"], store["head"] = frame, frame[:10]
    to_disk(store)
    assert argument(store, "whole").equals(frame)
    assert argument(store, "head").equals(frame[:10])


def test_arrow_tables_count_their_buffers_once(store: GpuSpillBuffer) -> None:
    table = pa.table({"a": np.arange(50_000), "b": np.arange(50_000) / 3})
    store["whole"], store["part"] = table, table.slice(10, 5)
    assert 800_000 <= store.tiers["host"] < 800_000 + SMALL
    to_disk(store)
    assert argument(store, "part").equals(table.slice(10, 5))


@pytest.mark.parametrize(
    "x",
    [np.array([1, "a"], dtype=object), np.ma.array([1, 2]), np.rec.array([(1,)]), pd.Index([1]), "text", np.float64(1)],
)
def test_what_may_refer_to_more_is_left_to_dask(x: Any) -> None:
    assert not held_by(x)


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@given(SPANS)
@settings(deadline=None)
def test_any_overlapping_views_come_back_from_disk(spans: list[tuple[int, int]]) -> None:
    base = np.arange(64, dtype="u1")
    views = [base[min(a, b) : max(a, b)] for a, b in spans]
    disk = Disk(None)
    try:
        stored = pickled.write(disk, views)
        apart = sum(len(v) for v in views)
        assert stored.stored.sizes[0] + sum(stored.stored.sizes[1:]) == stored.nbytes
        assert sum(stored.stored.sizes[1:]) <= apart
        assert stored.stored.sizes[0] == len(pickle.dumps(views, protocol=5, buffer_callback=lambda _: None))
        for found, view in zip(pickled.read(disk, stored), views, strict=True):
            np.testing.assert_array_equal(found, view)
    finally:
        del stored
        disk.close()


def test_what_lies_inside_another_is_written_once() -> None:
    base = np.arange(1000, dtype="u1")
    disk = Disk(None)
    try:
        stored = pickled.write(disk, [base[10:20], base, {"x": base[500:]}, base[:500]])
        assert sum(stored.stored.sizes[1:]) == 1000
        found = pickled.read(disk, stored)
        assert (found[0][0], found[2]["x"][0], found[3][-1]) == (10, 500 % 256, 499 % 256)
        del stored, found
    finally:
        disk.close()
