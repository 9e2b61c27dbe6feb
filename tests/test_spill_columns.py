"""JIT-unspill of data frames: of one that lies on disk a column is read alone, and is what it would be otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_series_equal

from hpcgpu.errors import SpillError
from hpcgpu.spill import GpuSpillBuffer, columns
from hpcgpu.spill.proxy import is_proxy, unproxy

ROWS = 40_000
NUMBERS_BYTES = 8 * ROWS
FEW_BYTES = 8192  # the pickle, without columns and index


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GpuSpillBuffer]:
    made = GpuSpillBuffer(0, None, str(tmp_path), jit_unspill=True)
    yield made
    made.close()


def numbers(count: int = 10, rows: int = ROWS) -> pd.DataFrame:
    return pd.DataFrame({f"c{i}": np.arange(rows) + i / 2 for i in range(count)})


def text(count: int) -> Any:
    return pd.array([f"text {i}" for i in range(count)], dtype="string[pyarrow]")  # before pandas 3 objects are usual


def to_disk(store: GpuSpillBuffer) -> None:
    while store.tiers["host"] > FEW_BYTES:
        store.evict()
        assert store.settle(10)


def argument(store: GpuSpillBuffer, key: Any) -> Any:
    """A key as the argument of a task."""
    with store.handing_out_handles():
        value = store[key]
    with store.using([key]):
        return value.resolve() if hasattr(value, "resolve") else value


def spilled(store: GpuSpillBuffer, frame: pd.DataFrame) -> Any:
    """Return the proxy of a frame that was stored in a list and is on disk."""
    store["list"] = [frame, "text"]
    to_disk(store)
    proxy = argument(store, "list")[0]
    assert is_proxy(proxy)
    return proxy


def read_bytes(store: GpuSpillBuffer) -> int:
    return store.counters["disk_to_host"].nbytes


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, pd.DataFrame):
        assert_same(found.columns, expected.columns)
        assert_same(found.dtypes, expected.dtypes)
        for i in range(len(expected.columns)):
            assert_same(found.iloc[:, i], expected.iloc[:, i])
        assert found.flags == expected.flags
    elif isinstance(expected, pd.Series):
        assert_series_equal(found, expected, check_flags=True, check_index=False)
    elif isinstance(expected, pd.Index):  # assert_index_equal takes half a second for one of text
        assert found.identical(expected)
        assert getattr(found, "freq", None) == getattr(expected, "freq", None)
    elif isinstance(expected, list):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected
    if isinstance(expected, (pd.DataFrame, pd.Series)):
        assert found.attrs == expected.attrs
        assert_same(found.index, expected.index)


def test_one_column_is_read_and_the_frame_stays_on_disk(store: GpuSpillBuffer) -> None:
    frame = numbers()
    proxy = spilled(store, frame.copy())
    for ask, columns_read in {
        (lambda f: f["c3"]): 1,
        (lambda f: f.c9): 1,
        (lambda f: f[["c7", "c0"]]): 2,
        (lambda f: f[["c7", "c7"]]): 1,
        (lambda f: f[[]]): 0,
        (lambda f: f.shape): 0,
        (lambda f: len(f)): 0,
        (lambda f: "c3" in f): 0,
        (lambda f: "no" in f): 0,
        (lambda f: f.columns): 0,
        (lambda f: f.index): 0,
        (lambda f: f.dtypes): 0,
        (lambda f: f.axes): 0,
        (lambda f: f.keys()): 0,
        (lambda f: list(f)): 0,
        (lambda f: (f.ndim, f.size, f.empty)): 0,
    }.items():
        before = read_bytes(store)
        assert_same(ask(proxy), ask(frame))
        read = read_bytes(store) - before
        assert columns_read * NUMBERS_BYTES <= read <= columns_read * NUMBERS_BYTES + 3 * FEW_BYTES
    assert store.tiers["host"] <= FEW_BYTES
    assert_same(unproxy(proxy), frame)


def test_a_column_that_is_stored_counts_as_what_it_is(store: GpuSpillBuffer) -> None:
    proxy = spilled(store, numbers().assign(text=text(ROWS)))
    store["column"] = proxy["c3"]
    assert NUMBERS_BYTES <= store.tiers["host"] <= NUMBERS_BYTES + 2 * FEW_BYTES
    store["text"] = proxy["text"]
    assert store.tiers["host"] <= 4 * NUMBERS_BYTES  # 10 bytes and where they begin


@pytest.mark.parametrize(
    "ask",
    [
        lambda f: f.sum(),
        lambda f: f[f["c1"] > 100],
        lambda f: f[[True, False] * (ROWS // 2)],
        lambda f: f[10:20],
        lambda f: f[lambda x: x["c2"] < 7],
        lambda f: f.loc[5:7, "c3"],
        lambda f: f[np.array(["c1", "c2"])],
        lambda f: f.head(),
        lambda f: f + f,
        lambda f: f.assign(x=1),
    ],
)
def test_anything_else_brings_it_up(store: GpuSpillBuffer, ask: Callable[[Any], Any]) -> None:
    frame = numbers()
    proxy = spilled(store, frame.copy())
    assert_same(ask(proxy), ask(frame))
    assert store.tiers["host"] >= 10 * NUMBERS_BYTES


def test_what_is_no_column_is_an_error_as_of_the_frame(store: GpuSpillBuffer) -> None:
    proxy = spilled(store, numbers())
    with pytest.raises(KeyError, match="no"):
        proxy["no"]
    with pytest.raises(KeyError, match="no"):
        proxy[["c1", "no"]]
    with pytest.raises(AttributeError, match="no"):
        _ = proxy.no


def test_who_walks_the_columns_of_a_frame_needs_no_room_for_it(tmp_path: Path) -> None:
    frame = numbers(20)
    store = GpuSpillBuffer(0, 10 * NUMBERS_BYTES, str(tmp_path), jit_unspill=True)  # 6 for the store
    try:
        proxy = spilled(store, frame.copy())
        for name in proxy:
            assert proxy[name].sum() == frame[name].sum()
            assert store.tiers["host"] <= FEW_BYTES
        assert read_bytes(store) <= 20 * NUMBERS_BYTES + 21 * FEW_BYTES
    finally:
        store.close()


def test_columns_that_are_read_again_and_again_bring_it_up(store: GpuSpillBuffer) -> None:
    frame = numbers()
    proxy = spilled(store, frame.copy())
    for _ in range(100):
        assert proxy["c5"].iloc[-1] == frame["c5"].iloc[-1]
    assert store.tiers["host"] >= 10 * NUMBERS_BYTES
    assert read_bytes(store) <= 3.2 * 10 * NUMBERS_BYTES  # twice its bytes, and once all of it
    to_disk(store)
    before = read_bytes(store)
    assert_same(proxy["c5"], frame["c5"])
    assert read_bytes(store) - before <= NUMBERS_BYTES + FEW_BYTES


def test_a_small_frame_comes_up_as_a_whole(store: GpuSpillBuffer) -> None:
    frame = numbers(rows=columns.LEAST_BYTES // 160)
    proxy = spilled(store, frame.copy())
    assert_same(proxy["c5"], frame["c5"])
    assert store.tiers["host"] >= frame.memory_usage().sum() - 1000


def test_of_what_is_mostly_pickled_in_one_piece_all_comes_up(store: GpuSpillBuffer) -> None:
    frame = numbers(4).assign(**{f"d{i}": pd.date_range("2020", periods=ROWS, freq="h") for i in range(6)})
    proxy = spilled(store, frame.copy())
    assert_same(proxy["c1"], frame["c1"])
    assert store.tiers["host"] >= 10 * NUMBERS_BYTES


def test_what_was_written_to_the_frame_is_in_its_columns(store: GpuSpillBuffer) -> None:
    frame = numbers()
    proxy = spilled(store, frame.copy())
    for x in (frame, proxy):
        x["c1"] = 7.0
        x.loc[3, "c2"] = -1.0
        x["new"] = np.arange(ROWS) * 2
    to_disk(store)
    for name in ("c1", "c2", "new", "c0"):
        assert_same(proxy[name], frame[name])
    assert_same(proxy.dtypes, frame.dtypes)
    assert store.tiers["host"] <= FEW_BYTES


def test_writing_to_a_column_leaves_the_frame_as_it_is(store: GpuSpillBuffer) -> None:
    frame = numbers()
    proxy = spilled(store, frame.copy())
    column, part = proxy["c1"], proxy[["c1", "c2"]]
    column.iloc[0] = part.iloc[0, 1] = -5.0
    assert (column.iloc[0], part["c2"].iloc[0]) == (-5.0, -5.0)
    assert_same(unproxy(proxy), frame)


def test_a_column_that_cannot_be_read_is_a_fault(store: GpuSpillBuffer) -> None:
    faults: list[SpillError] = []
    store.on_fault = faults.append
    proxy = spilled(store, numbers())
    for path in Path(store.disk.folder).iterdir():
        path.write_bytes(b"")
    with pytest.raises(SpillError, match="cut off"):
        proxy["c1"]
    assert len(faults) == 1


def test_columns_are_right_while_the_frame_comes_and_goes(store: GpuSpillBuffer) -> None:
    frame = numbers()
    proxy = spilled(store, frame.copy())
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            unproxy(proxy)
            store.evict()

    def read(i: int) -> bool:
        return all(proxy[f"c{(i + k) % 10}"].equals(frame[f"c{(i + k) % 10}"]) for k in range(40))

    with ThreadPoolExecutor(4) as pool:
        moving = pool.submit(come_and_go)
        found = [future.result(60) for future in [pool.submit(read, i) for i in range(6)]]
        stop.set()
        moving.result(60)
    assert all(found)


KINDS: dict[str, Callable[[int], Any]] = {
    "float": lambda n: np.arange(n) / 3,
    "int": lambda n: np.arange(n),
    "int8": lambda n: np.arange(n).astype("i1"),
    "bool": lambda n: np.arange(n) % 3 == 0,
    "complex": lambda n: np.arange(n) * 1j,
    "str": lambda n: [f"text {i}" for i in range(n)],
    "text": text,
    "missing text": lambda n: ["x", None] * (n // 2),
    "object": lambda n: pd.Series([("tuple", i) for i in range(n)], dtype=object),
    "category": lambda n: pd.Categorical(["x", "y"] * (n // 2)),
    "category of numbers": lambda n: pd.Categorical(np.arange(n) // 2),
    "date": lambda n: pd.date_range("2020", periods=n, freq="h"),
    "date of a zone": lambda n: pd.date_range("2020", periods=n, freq="h", tz="UTC"),
    "span": lambda n: pd.to_timedelta(np.arange(n), unit="s"),
    "period": lambda n: pd.period_range("2020", periods=n, freq="h"),
    "interval": lambda n: pd.interval_range(0, n),
    "sparse": lambda n: pd.arrays.SparseArray([0, 1] * (n // 2)),
    "Int64": lambda n: pd.array([1, None] * (n // 2), dtype="Int64"),
    "boolean": lambda n: pd.array([True, None] * (n // 2), dtype="boolean"),
    "arrow": lambda n: pd.array(np.arange(n), dtype="int64[pyarrow]"),
    "chunks": lambda n: pd.concat([pd.Series(["a", "b"] * (n // 4)), pd.Series(["c", None] * (n // 4))]).array,
}


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_every_kind(store: GpuSpillBuffer, kind: str) -> None:
    frame = numbers(8)
    frame.insert(3, "x", KINDS[kind](ROWS))
    proxy = spilled(store, frame.copy())
    assert_same(proxy.dtypes, frame.dtypes)
    assert_same(proxy["c3"], frame["c3"])
    assert store.tiers["host"] <= FEW_BYTES
    for key in ("x", ["c2", "x"], ["x"]):
        assert_same(proxy[key], frame[key])
    refers = frame["x"].dtype == object or isinstance(frame["x"].dtype, (pd.IntervalDtype, pd.SparseDtype))
    assert (store.tiers["host"] <= FEW_BYTES) is not refers
    assert_same(unproxy(proxy), frame)


SHAPES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "numbers": lambda f: f.set_axis(np.arange(ROWS) * 2, axis=0),
    "text": lambda f: f.set_axis(pd.Index(text(ROWS)), axis=0),
    "dates": lambda f: f.set_axis(pd.date_range("2020", periods=ROWS, freq="h", name="when"), axis=0),
    "levels": lambda f: f.set_axis(pd.MultiIndex.from_arrays([np.arange(ROWS) // 7, np.arange(ROWS)]), axis=0),
    "a column": lambda f: f.set_index("c1", drop=False),
    "a column of text": lambda f: f.assign(s=text(ROWS)).set_index("s", drop=False),
    "a column of categories": lambda f: f.assign(k=pd.Categorical(np.arange(ROWS))).set_index("k", drop=False),
    "a column's memory": lambda f: f.set_axis(pd.Index(f["c1"].array, copy=False), axis=0),
    "categories that are a column": lambda f: f.assign(
        s=(s := pd.Series(text(ROWS))),
        k=pd.Categorical.from_codes(np.arange(ROWS), categories=pd.Index(s.array, copy=False)),
    ),
    "intervals of columns": lambda f: f.assign(
        i=pd.arrays.IntervalArray.from_arrays(f["c0"].array, f["c1"].array, copy=False)
    ),
    "arrays in a column": lambda f: f.assign(o=pd.Series([f["c1"].to_numpy()[:1]] * ROWS, dtype=object)),
    "attributes": lambda f: f if f.attrs.update(a=1, text=pa.array(["x", "y"])) is None else None,
    "names again": lambda f: f.set_axis(["a", "b", "a", "c", "c", "c", "d", "e"], axis=1),
    "numbers as names": lambda f: f.set_axis([0, 1, True, 2.5, None, "x", ("t", 1), float("nan")], axis=1),
    "names in levels": lambda f: f.set_axis(
        pd.MultiIndex.from_tuples([(a, b) for a in "abcd" for b in "xy"], names=["one", "two"]), axis=1
    ),
    "rows in order of memory": lambda f: pd.DataFrame(f.to_numpy(), columns=f.columns),
    "no rows in between": lambda f: f[::2],
    "blocks apart": lambda f: f[["c3", "c1"]].assign(x=1, y=f["c2"], z=2),
    "mixed blocks": lambda f: f.astype({"c1": "int64", "c4": "int64", "c6": "float32"}).copy(),
    "no duplicates": lambda f: f.set_flags(allows_duplicate_labels=False),
}


# of these each column lies in all of the memory, or may refer to anything
WHOLE = {"rows in order of memory", "no rows in between", "intervals of columns", "arrays in a column"}


@pytest.mark.parametrize("shape", SHAPES)
def test_frames_of_every_shape(store: GpuSpillBuffer, shape: str) -> None:
    frame = SHAPES[shape](numbers(8))
    proxy = spilled(store, frame.copy(deep=False))
    if shape not in WHOLE:
        for name in dict.fromkeys(frame.columns[-2:]):
            assert_same(proxy[name], frame[name])
        assert store.tiers["host"] <= FEW_BYTES
    for name in dict.fromkeys(frame.columns):
        assert_same(proxy[name], frame[name])
        if not isinstance(name, bool):
            assert_same(proxy[[name]], frame[[name]])
    if isinstance(frame.columns, pd.MultiIndex):
        assert_same(proxy["b"], frame["b"])
        assert_same(proxy[["b", "d"]], frame[["b", "d"]])
    assert_same(proxy.index, frame.index)
    assert_same(proxy.columns, frame.columns)
    assert_same(unproxy(proxy), frame)


def test_frames_that_share_columns_are_written_once_and_read_apart(store: GpuSpillBuffer) -> None:
    frame = numbers()
    store["list"] = [frame, frame.iloc[:, 2:5], frame.iloc[:, ::-1], frame["c3"]]
    expected = [x.copy() for x in store["list"]]
    assert store.tiers["host"] <= 10 * NUMBERS_BYTES + FEW_BYTES
    del frame
    to_disk(store)
    found = argument(store, "list")
    for proxy, real in zip(found[:3], expected[:3], strict=True):
        assert_same(proxy["c3"], real["c3"])
        assert_same(proxy.columns, real.columns)
    assert_same([unproxy(x) for x in found], expected)


@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6), st.data())
@settings(deadline=None, max_examples=40)
def test_any_columns_of_any_frame(kinds: list[str], data: st.DataObject) -> None:
    frame = numbers(2, rows=6000)  # big enough to be a unit
    for i, kind in enumerate(kinds):
        frame.insert(data.draw(st.integers(0, len(frame.columns))), i, KINDS[kind](6000))
    many = len(frame.columns)
    frame.columns = names = data.draw(st.lists(st.sampled_from("abc"), min_size=many, max_size=many))
    keys = data.draw(st.lists(st.sampled_from(sorted(set(names))), min_size=1, max_size=3))
    store = GpuSpillBuffer(0, None, jit_unspill=True)
    least, columns.LEAST_BYTES = columns.LEAST_BYTES, 0
    try:
        store["list"] = [frame]
        to_disk(store)
        found = argument(store, "list")[0]
        assert is_proxy(found)
        for key in (*keys, keys):
            assert_same(found[key], frame[key])
        assert_same(unproxy(found), frame)
    finally:
        columns.LEAST_BYTES = least
        store.close()
