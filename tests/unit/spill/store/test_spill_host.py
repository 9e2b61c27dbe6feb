"""Objects in host memory count by allocation, go to disk together, and come back as they were."""

import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spill_stores import KIB, NewStore, argument, to_disk

from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxies import is_proxy, unproxy
from hpcgpu.spill.storage.disk import Disk, Pickled
from hpcgpu.spill.storage.segments import room_for
from hpcgpu.spill.values.host_objects import held_by

WHOLE = 800 * KIB
SMALL = 2 * KIB  # what is left of values without their arrays, and pickles
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
ROWS = 1000
# of these each part has what it shows of them for itself; of categories the codes alone are counted
APART = {"interval", "sparse", "chunks", "category of numbers"}
SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)


@pytest.fixture
def store(stored: NewStore) -> GpuSpillBuffer:
    """A store whose host tier is never full: only ``evict`` sends something to disk."""
    return stored(0, None)


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk(None)
    yield made
    made.close()


def whole() -> np.ndarray:
    return np.arange(WHOLE // 8, dtype="i8").reshape(80, -1)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_counts_as_what_it_keeps_alive(store: GpuSpillBuffer, view: Callable[[np.ndarray], Any]) -> None:
    store["view"] = view(whole())
    assert WHOLE <= store.tiers["host"] < WHOLE + SMALL


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


def test_value_with_a_waiter_is_written_without_its_key(store: GpuSpillBuffer) -> None:
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


def test_write_to_one_view_shows_in_others_after_the_disk(store: GpuSpillBuffer) -> None:
    x = whole()
    store["whole"], store["part"] = x, x[5:8]
    del x
    to_disk(store)
    assert argument(store, "part")[0, 0] == 5 * 1280  # now there is a copy on disk
    gc.collect()
    store["part"][...] = 7  # as get_worker().data["part"]
    to_disk(store)
    assert (argument(store, "part") == 7).all()


@pytest.mark.parametrize("order", [(0, 1, 2, 0), (1, 2, 0, 0), (0, 0, 1, 1, 0)])  # 0: the owner; its views
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
    to_disk(store)
    assert store.tiers["disk"] < held + 100 * SMALL  # in blocks of 4 KiB, and it may take several moves
    for i in range(0, 100, 9):
        part = argument(store, ("part", i))
        assert (len(part), part.c3.iloc[0], part.index[-1]) == (100, 100.0 * i, 100 * i + 99)
    assert (argument(store, "split")[42].c9 == argument(store, ("part", 42)).c9).all()


@pytest.mark.parametrize("jit", [False, True], ids=["whole", "jit"])
def test_a_frame_its_columns_and_its_array_are_one(stored: NewStore, jit: bool) -> None:
    frame = pd.DataFrame(np.arange(100_000.0).reshape(10, -1).T, columns=list("abcdefghij"))  # 800 kB, as read_parquet
    store = stored(0, None, jit_unspill=jit)
    store["list"] = [frame, frame.iloc[:, 2:5], frame["c"]]
    store["array"] = frame.to_numpy()
    expected = [frame.copy(), frame.iloc[:, 2:5].copy(), frame["c"].copy()]
    assert 800_000 <= store.tiers["host"] < 800_000 + SMALL
    del frame
    to_disk(store)
    assert 800_000 <= store.tiers["disk"] <= room_for(800_000 + SMALL) + room_for(SMALL)
    found, array = argument(store, "list"), argument(store, "array")
    assert [is_proxy(x) for x in found] == [jit] * 3
    for x, real in zip(map(unproxy, found), expected, strict=True):
        assert x.equals(real)
    assert (array == expected[0].to_numpy()).all()
    assert 800_000 <= store.tiers["host"] < 800_000 + 2 * SMALL


def text(count: int) -> Any:
    return pd.array([f"text {i}" for i in range(count)], dtype="string[pyarrow]")  # before pandas 3 objects are usual


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
SHAPES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "all kinds": lambda f: f.assign(**{kind: make(ROWS) for kind, make in KINDS.items()}),
    "series": lambda f: f["c1"].set_axis(np.arange(ROWS) * 2, axis=0),
    "numbers": lambda f: f.set_axis(np.arange(ROWS) * 2, axis=0),
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
    "rows in order of memory": lambda f: pd.DataFrame(f.to_numpy(), columns=f.columns),
    "no rows": lambda f: f[:0],
    "mixed blocks": lambda f: f.astype({"c1": "int64", "c4": "int64", "c6": "float32"}).copy(),
}


@pytest.mark.parametrize("jit", [False, True], ids=["whole", "jit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_frames_come_back_as_they_were(stored: NewStore, shape: str, jit: bool) -> None:
    frame = SHAPES[shape](pd.DataFrame({f"c{i}": np.arange(ROWS) + i / 2 for i in range(8)}))
    same = pd.testing.assert_frame_equal if isinstance(frame, pd.DataFrame) else pd.testing.assert_series_equal
    store = stored(0, None, jit_unspill=jit)
    store["whole"], store["list"] = frame.copy(deep=False), [frame.copy(), frame[:10]]
    to_disk(store)
    found_again = (argument(store, "whole"), *map(unproxy, argument(store, "list")))
    for found, real in zip(found_again, (frame, frame, frame[:10]), strict=True):
        same(found, real, check_exact=True, check_flags=True, check_index_type=True)
        assert found.attrs == frame.attrs


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - APART))
def test_part_of_a_frame_counts_the_columns_it_keeps_alive(kind: str) -> None:
    frame = pd.DataFrame({"x": KINDS[kind](ROWS)})
    assert sum(held_by(frame[:10]).values()) >= frame["x"].array.nbytes * 0.98  # categories


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


@given(SPANS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_overlapping_views_come_back_from_disk(disk: Disk, spans: list[tuple[int, int]]) -> None:
    base = np.arange(64, dtype="u1")
    views = [base[min(a, b) : max(a, b)] for a, b in spans]
    stored = Pickled.write(disk, views)
    assert sum(stored.stored.sizes[1:]) <= sum(map(len, views))
    assert stored.stored.sizes[0] == len(pickle.dumps(views, protocol=5, buffer_callback=lambda _: None))
    for found, view in zip(stored.read(disk), views, strict=True):
        np.testing.assert_array_equal(found, view)


def test_what_lies_inside_another_is_written_once(disk: Disk) -> None:
    base = np.arange(1000, dtype="u1")
    stored = Pickled.write(disk, [base[10:20], base, {"x": base[500:]}, base[:500]])
    assert sum(stored.stored.sizes[1:]) == 1000
    found = stored.read(disk)
    assert (found[0][0], found[2]["x"][0], found[3][-1]) == (10, 500 % 256, 499 % 256)
