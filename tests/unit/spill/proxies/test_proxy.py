"""A proxy stands for its object: it loads late, once, and again after a release, and tells of writes."""

import copy
import operator
import pickle
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from dask.array.core import concatenate3
from dask.array.dispatch import concatenate_lookup, einsum_lookup, numel_lookup, take_lookup, tensordot_lookup
from dask.array.utils import meta_from_array
from dask.base import is_dask_collection
from dask.sizeof import sizeof
from dask.tokenize import tokenize
from dask.utils import is_arraylike, typename
from distributed.protocol import deserialize, serialize
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from programs import python
from waiting import scaled

from hpcgpu import sim
from hpcgpu.errors import SpillError
from hpcgpu.sim import SimGpu
from hpcgpu.spill.proxies import asproxy, is_proxy, make_proxy, register, release, source_of, unproxy

register()

GPU = SimGpu(1 << 20)
Pair = namedtuple("Pair", "left right")
ARRAYS = pytest.mark.parametrize("kind", ["numpy", "sim"])
FRAME = pd.DataFrame({"k": [1, 2, 1, 3], "v": [1.0, 2.0, 3.0, 4.0]})
VALUES = [np.arange(3), FRAME, [1, 2], {"a": 1}, (1, "b"), {1, 2}, "text", GPU.asarray(np.ones(2))]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
COMPARE = [operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge]
WRITES: dict[str, Any] = {
    "item": lambda p: operator.setitem(p, slice(1, 3), 7),
    "mask": lambda p: operator.setitem(p, asproxy(p > 3), asproxy(p[p > 3] * 2)),
    "out": lambda p: operator.is_(np.add(p, 1, out=p), p) or pytest.fail("not the proxy"),
    "cumsum": lambda p: np.cumsum(p * 1, out=p),
    "copyto": lambda p: np.copyto(p, p[::-1] * 1),
    "fill": lambda p: p.fill(3),
    "shape": lambda p: setattr(p, "shape", (2, 3)),
}
NUMPY = {
    "concatenate": lambda p, a: np.concatenate([p, a, p]),
    "stack": lambda p, a: np.stack((a, p)),
    "where": lambda p, a: np.where(p > 2, p, a),
    "einsum": lambda p, a: np.einsum("i,i->", p, a),
    "tensordot": lambda p, a: np.tensordot(p, a, axes=1),
    "sum": lambda p, a: np.sum(p),
    "qr": lambda p, a: np.linalg.qr(np.stack([p, a * a]))[1],
    "add": lambda p, a: np.add(a, p),
    "reduce": lambda p, a: np.add.reduce(p),
    "outer": lambda p, a: np.multiply.outer(p, a),
    "getitem": lambda p, a: p[p > 1],
    "T": lambda p, a: a.reshape(2, 3) @ p.reshape(2, 3).T,
    "neg": lambda p, a: abs(-p),
}
ALONE = """
import sys
import hpcgpu
import pandas as pd
p = hpcgpu.asproxy(pd.DataFrame({"a": range(3)}))
assert not {"dask", "distributed"} & set(sys.modules), "a proxy is light"
import dask.dataframe
from dask.sizeof import sizeof
from dask.tokenize import tokenize
from distributed.protocol import deserialize, serialize
d = hpcgpu.unproxy(p)
assert len(dask.dataframe.dispatch.concat([p, d])) == 6
assert sizeof(p) >= d.memory_usage().sum()
assert tokenize(p) == tokenize(d)
assert type(deserialize(*serialize(p))) is pd.DataFrame
print("known")
"""


class Stored:
    """A source that keeps its object as a copy below, and counts; ``fails`` is raised instead of the next loads."""

    nbytes = 12345

    def __init__(self, value: Any) -> None:
        self._up: Any = None
        self._below = copy.deepcopy(value)
        self.kind = type(value)
        self.loads = self.dirtied = self.pins = 0
        self.fails: list[Exception] = []
        self.lock = threading.Lock()
        self.proxies: list[weakref.ref[Any]] = []

    def proxy(self) -> Any:
        p = make_proxy(self)
        self.proxies.append(weakref.ref(p))
        return p

    def answers(self) -> dict[str, Any]:
        return {}

    def up(self) -> Any:
        with self.lock:
            if self.fails:
                raise self.fails.pop()
            if self._up is None:
                self.loads += 1
                self._up = copy.deepcopy(self._below)
            return self._up

    @contextmanager
    def using(self) -> Iterator[Any]:
        found = self.up()
        self.pins += 1
        yield found
        self.pins -= 1

    def dirty(self) -> None:
        assert self.pins, "written to while nothing kept it up"
        self._below = None
        self.dirtied += 1

    def evict(self) -> None:
        assert not self.pins
        if self._below is None:
            self._below = copy.deepcopy(self._up)
        self._up = None
        for ref in self.proxies:
            if (p := ref()) is not None:
                release(p)

    def value(self) -> Any:
        """What is stored, after it went down and came up again."""
        self.evict()
        return self.up()


@dataclass(frozen=True)
class Record:
    name: str
    part: Any


def host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") and hasattr(x, "__hpcgpu_device__") else x


def array(kind: str, n: int = 6) -> Any:
    x = np.arange(float(n))
    return x if kind == "numpy" else GPU.asarray(x)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_what_it_is_is_known_without_loading(value: Any) -> None:
    stored = Stored(value)
    p = stored.proxy()
    assert isinstance(p, type(value))
    assert p.__class__ is type(value)
    assert is_proxy(p)
    assert not is_proxy(value)
    assert source_of(p) is stored
    assert typename(type(p)) == typename(type(value))
    assert str(type(p)) == str(type(value))
    assert sizeof(p) == stored.nbytes
    assert sizeof([p]) > stored.nbytes
    assert not is_dask_collection(p)
    assert not hasattr(p, "__dask_graph__")
    assert type(value).__name__ in repr(p)
    assert type(p) is type(asproxy(value))
    assert stored.loads == 0


@pytest.mark.parametrize("value", [(1, "b"), "text", [1, 2], {"a": 1}, {1, 2}, 3, 2.5, frozenset({1})], ids=str)
def test_python_takes_it_for_its_object(value: Any) -> None:
    p = Stored(value).proxy()
    assert p == value
    assert value == p
    assert (p != value) is False
    assert bool(p) is bool(value)
    assert str(p) == str(value)
    assert f"{p}" == f"{value}"
    assert isinstance(p, Iterable) is isinstance(value, Iterable)
    assert callable(p) is callable(value)
    for question in (hash, len, sorted, list, float, reversed, dir):
        try:
            expected = question(value)
        except (TypeError, ValueError) as error:
            with pytest.raises(type(error)):
                question(p)
        else:
            assert type(question(p)) is type(expected)
            assert question is reversed or question(p) == expected


def test_containers_are_read_and_written_in_the_store() -> None:
    stored = Stored({"a": [1, 2], "b": 3})
    p = stored.proxy()
    assert "a" in p
    assert p["a"][1] == 2
    assert list(p) == list(p.keys()) == ["a", "b"]
    p["c"] = 4
    del p["b"]
    p.update(d=5)
    assert stored.dirtied == 3
    assert stored.value() == {"a": [1, 2], "c": 4, "d": 5}
    numbers = Stored([3, 1])
    q = same = numbers.proxy()
    q += [2]
    q.append(0)
    q.sort()
    assert q is same
    assert numbers.dirtied == 3
    assert numbers.value() == [0, 1, 2, 3]
    assert [9] + q == [9, 0, 1, 2, 3]  # noqa: RUF005
    assert np.asarray(q).tolist() == [0, 1, 2, 3]


def test_operator_without_in_place_form_replaces_the_object() -> None:
    stored = Stored((1, 2))
    p = stored.proxy()
    q = p
    q += (3,)
    assert not is_proxy(q)
    assert q == (1, 2, 3)
    assert stored.value() == (1, 2)


@ARRAYS
@pytest.mark.parametrize("op", [*BINARY, *COMPARE, operator.matmul], ids=lambda f: f.__name__)
def test_operators(kind: str, op: Any) -> None:
    a, b = array(kind) + 1, array(kind) + 2
    p, q = Stored(a).proxy(), Stored(b).proxy()
    for x, y in ((p, b), (a, q), (p, q)):
        result = op(x, y)
        assert not is_proxy(result)
        assert type(result) is type(op(a, b))
        np.testing.assert_array_equal(host(result), host(op(a, b)))


def test_operators_of_numbers() -> None:
    p = Stored(7).proxy()
    assert (divmod(p, 2), divmod(30, p)) == (divmod(7, 2), divmod(30, 7))
    assert (pow(p, 2, 5), 2**p, p << 1, 1 | p, -p, ~p) == (4, 128, 14, 7, -7, -8)
    assert [range(9)[p], round(p), int(p), float(p), complex(p)] == [7, 7, 7, 7.0, 7 + 0j]


@ARRAYS
@pytest.mark.parametrize("op", ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"])
def test_in_place_operators_write_the_stored_array(kind: str, op: str) -> None:
    stored = Stored(array(kind) + 1)
    expected = getattr(operator, op)(array("numpy") + 1, array("numpy") + 2)
    p = stored.proxy()
    result = getattr(operator, op)(p, asproxy(array(kind) + 2))
    assert result is p
    assert stored.dirtied == 1
    np.testing.assert_array_equal(host(stored.value()), expected)


@ARRAYS
@pytest.mark.parametrize("name", WRITES)
def test_every_write_reaches_the_stored_array(kind: str, name: str) -> None:
    expected, write = array("numpy"), WRITES[name]
    write(asproxy(expected))
    stored = Stored(array(kind))
    p = stored.proxy()
    assert host(p[0]) == 0
    before = stored.value()
    assert stored.dirtied == 0
    write(p)
    assert stored.dirtied >= 1
    assert stored.up() is before
    np.testing.assert_array_equal(host(stored.value()), expected)
    assert host(p).shape == expected.shape


def test_what_is_put_in_is_no_proxy_unless_a_container_keeps_it() -> None:
    class Compiled:
        """Looks at types, as CuPy's arrays do."""

        def __setitem__(self, index: Any, value: Any) -> None:
            self.got = type(index), type(value)

    p, q = Stored(Compiled()).proxy(), asproxy(np.ones(1))
    p[q] = q
    assert p.got == (np.ndarray, np.ndarray)
    box = Stored([0]).proxy()
    box[0] = q
    assert box[0] is q


@ARRAYS
@pytest.mark.parametrize("name", NUMPY)
def test_numpy(kind: str, name: str) -> None:
    a = array(kind)
    stored = Stored(a)
    result, expected = NUMPY[name](stored.proxy(), a), NUMPY[name](a, a)
    assert type(result) is type(expected)
    np.testing.assert_allclose(host(result), host(expected))
    assert stored.pins == 0
    assert stored.loads == 1


def test_arrays_are_kept_up_while_numpy_computes() -> None:
    pins = []

    class Watching(np.ndarray):
        def __array_function__(self, *_: Any) -> Any:
            pins.append((inner.pins, outer.pins))
            return "done"

    inner = Stored(np.ones(2).view(Watching))
    outer = Stored([inner.proxy()])
    outer._below = [inner.proxy()]
    outer.up = lambda: outer._below  # type: ignore[method-assign]
    assert np.concatenate(outer.proxy()) == "done"
    assert pins == [(1, 1)]
    assert (inner.pins, outer.pins) == (0, 0)


def test_interfaces_are_there_where_the_class_has_them() -> None:
    class OnDevice:
        @property
        def __cuda_array_interface__(self) -> dict[str, int]:
            return {"version": 3}

    a = np.arange(3)
    assert asproxy(a).__array_interface__ == a.__array_interface__
    assert np.shares_memory(np.asarray(asproxy(a)), a)
    assert not hasattr(asproxy(a), "__cuda_array_interface__")
    stored = Stored(OnDevice())
    assert stored.proxy().__cuda_array_interface__ == {"version": 3}
    assert stored.dirtied == 1  # code that has the address may write there
    assert not hasattr(stored.proxy(), "__array_interface__")
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(asproxy(GPU.asarray(a)))
    assert asproxy(GPU.asarray(a)).get().tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_pickled_and_copied_it_is_the_object(value: Any) -> None:
    stored = Stored(value)
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps([stored.proxy()], protocol=5, buffer_callback=buffers.append)
    assert b"hpcgpu.spill" not in data  # who unpickles need not have this package
    results = [pickle.loads(data, buffers=buffers)[0], pickle.loads(pickle.dumps(stored.proxy(), protocol=2))]
    results += [copy.copy(stored.proxy()), copy.deepcopy({"x": stored.proxy()})["x"]]
    for result in results:
        assert type(result) is type(value)
        np.testing.assert_equal(np.array(host(result)), np.array(host(value)))


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_unproxy_gives_the_object_itself(value: Any) -> None:
    p = asproxy(value)
    assert unproxy(p) is value
    assert p.__wrapped__ is value
    assert asproxy(p) is p
    assert unproxy(value) is value
    assert asproxy(None) is None


def test_unproxy_leaves_no_proxy_at_any_depth() -> None:
    """What it walks is as traverse does, which any graph comes back from."""
    boxed = asproxy([asproxy([1]), Pair(asproxy("a"), 2)])
    result = unproxy({"x": (boxed, 3), "y": Record("r", [asproxy({"z": asproxy(4)})])})
    assert result == {"x": ([[1], Pair("a", 2)], 3), "y": Record("r", [{"z": 4}])}
    parts = [*result["x"], *result["x"][0], *result["x"][0][1], *result["y"].part, *result["y"].part[0].values()]
    assert not any(map(is_proxy, parts))
    plain = {"x": [(1, Pair(2, Record("r", 3)))]}
    assert unproxy(plain) is plain


@pytest.mark.parametrize("error", [AttributeError("no"), TypeError("no"), IndexError("no"), OSError(5, "no")], ids=repr)
def test_a_failing_load_is_not_an_answer(error: Exception) -> None:
    touches = [len, iter, np.sum, np.asarray, unproxy, pickle.dumps, lambda p: hasattr(p, "shape"), lambda p: p + 1]
    touches += [lambda p: p[0], lambda p: p == 1, lambda p: p.__setitem__(0, 1), lambda p: p.fill(0)]
    for touch in touches:
        stored = Stored(np.arange(3))
        stored.fails = [error]
        p = stored.proxy()
        with pytest.raises(SpillError, match=r"a numpy\.ndarray cannot be brought up"):
            touch(p)
        assert p.sum() == 3  # the next touch tries again


def test_no_memory_is_no_memory_and_the_next_touch_tries_again() -> None:
    stored = Stored(np.arange(3))
    stored.fails = [MemoryError("full")] * 3
    p = stored.proxy()
    for touch in (lambda: p.shape, lambda: p + 1, lambda: np.sum(p)):
        with pytest.raises(MemoryError, match="full"):
            touch()
    assert p.shape == (3,)


def test_an_error_of_the_object_stays_what_it_is() -> None:
    p = Stored(np.arange(3)).proxy()
    with pytest.raises(IndexError):
        p[9]
    with pytest.raises(AttributeError):
        p.no_such_thing  # noqa: B018
    with pytest.raises(ValueError, match="broadcast"):
        p + np.arange(4)


def test_threads_that_touch_it_load_it_once() -> None:
    stored = Stored(np.arange(1000))
    p = stored.proxy()
    start = threading.Barrier(8)

    def touch(_: int) -> int:
        start.wait(scaled(10))
        return int(p.sum())

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(touch, range(8))) == {499500}
    assert stored.loads == 1


def test_let_go_it_holds_nothing_and_loads_again() -> None:
    stored = Stored(np.arange(4))
    p = stored.proxy()
    for n in range(3):
        assert p.shape == (4,)
        assert p[n] == n
        assert stored.loads == n + 1
        alive = weakref.ref(stored.up())
        stored.evict()
        assert alive() is None


def test_a_thread_at_work_keeps_its_object() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(list):
        def __len__(self) -> int:
            begun.set()
            assert go_on.wait(scaled(10))
            return sum(1 for _ in self)

    stored = Stored(Slow([1, 2, 3]))
    p = stored.proxy()
    with ThreadPoolExecutor(1) as pool:
        length = pool.submit(len, p)
        assert begun.wait(scaled(10))
        stored.evict()
        go_on.set()
        assert length.result(scaled(10)) == 3
    assert p[0] == 1
    assert stored.loads == 2


def test_what_was_let_go_while_it_was_loaded_does_not_stay() -> None:
    stored = Stored(np.arange(4))
    p = stored.proxy()
    load = stored.up

    def up_and_down() -> Any:
        found = load()
        stored.evict()
        return found

    stored.up = up_and_down  # type: ignore[method-assign]
    assert p.shape == (4,)
    stored.up = load  # type: ignore[method-assign]
    p[0] = 9
    assert p[0] == 9, "the array that was evicted during the load is read"


def test_weak_references() -> None:
    stored = Stored(np.arange(3))
    p = stored.proxy()
    refs = [weakref.ref(p)]
    assert [r() is p for r in refs] == [True]
    assert stored.loads == 0
    assert p.sum() == 3
    gone = weakref.ref(source_of(p))
    del p, stored
    # no cycle: without the garbage collector
    assert refs[0]() is None
    assert gone() is None


def test_it_has_nothing_public_of_its_own() -> None:
    """An attribute of the proxy's class would hide the object's."""
    mine = {name for name in dir(type(asproxy(object()))) if not name.startswith("_")}
    assert mine == set()


# dask


def test_tokens_are_those_of_the_object() -> None:
    for value in (np.arange(3), [1, 2], {"a": 1}, FRAME):
        assert tokenize(Stored(value).proxy()) == tokenize(value)
    assert tokenize(asproxy([1])) != tokenize(asproxy([2]))


@ARRAYS
def test_dask_array_takes_it_for_an_array(kind: str) -> None:
    sim.register()
    a = array(kind)
    p = Stored(a).proxy()
    assert is_arraylike(p)
    assert not is_arraylike(Stored([1]).proxy())
    meta = meta_from_array(p, ndim=2)
    assert type(meta) is type(a)
    assert meta.shape == (0, 0)
    for lookup in (concatenate_lookup, tensordot_lookup, einsum_lookup, take_lookup):
        assert callable(lookup.dispatch(type(p)))
    assert host(concatenate_lookup.dispatch(type(p))([p, a], axis=0)).shape == (12,)
    assert host(tensordot_lookup.dispatch(type(p))(p, a, axes=1)) == 55
    assert host(einsum_lookup.dispatch(type(p))("i,i->i", p, p)).tolist() == [0, 1, 4, 9, 16, 25]
    assert host(take_lookup.dispatch(type(p))(p, np.array([1, 3]))).tolist() == [1, 3]
    assert numel_lookup(p) == 6
    assert type(concatenate3([p, p])) is type(a)
    x = da.concatenate([da.from_array(a, asarray=False), da.from_array(p, asarray=False)])
    assert host((x + 1).sum().compute(scheduler="sync")) == 42


def test_dask_handles_a_proxy_made_before_its_import() -> None:
    """In a client, where no store and no worker has registered anything."""
    pytest.importorskip("pyarrow", reason="dask.dataframe needs it")
    done = python(ALONE)
    assert (done.returncode, done.stdout) == (0, "known\n"), done.stderr


def test_masked_arrays_keep_their_own_functions() -> None:
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    p = asproxy(masked)
    result = concatenate_lookup.dispatch(type(p))([p, p])
    assert result.mask.tolist() == [False, True] * 2


@pytest.mark.filterwarnings("ignore:The inplace keyword")
def test_data_frames_are_data_frames() -> None:
    stored = Stored(FRAME)
    p, q = stored.proxy(), Stored(FRAME).proxy()
    pd.testing.assert_frame_equal(pd.concat([p, q]), pd.concat([FRAME, FRAME]))
    pd.testing.assert_frame_equal(p.merge(q, on="k"), FRAME.merge(FRAME, on="k"))
    pd.testing.assert_frame_equal(FRAME + p, FRAME * 2)
    pd.testing.assert_frame_equal(p + FRAME, FRAME * 2)
    pd.testing.assert_series_equal(p.groupby("k").v.sum(), FRAME.groupby("k").v.sum())
    assert p[p["v"] > 1].shape == (3, 2)
    assert np.asarray(p).shape == (4, 2)
    assert p.rename(columns={"v": "w"}).columns.tolist() == ["k", "w"]
    assert stored.dirtied == 0
    p.query("k < 4", inplace=True)
    assert stored.dirtied == 1
    p["w"] = p.v * 2
    p.loc[0, "v"] = 8.0
    p.pop("k")
    assert stored.dirtied == 4
    assert stored.value().iloc[0].to_dict() == {"v": 8.0, "w": 2.0}


def test_dask_dataframe_dispatches() -> None:
    pytest.importorskip("pyarrow", reason="dask.dataframe needs it")
    import dask.dataframe as dd
    from dask.dataframe.dispatch import (
        categorical_dtype,
        concat,
        group_split_dispatch,
        hash_object_dispatch,
        make_meta,
        meta_nonempty,
    )
    from dask.dataframe.multi import merge_chunk
    from dask.dataframe.utils import is_dataframe_like

    p, q = Stored(FRAME).proxy(), Stored(FRAME).proxy()
    assert is_dataframe_like(p)
    for frames in ([p, q], [FRAME, q], [p, FRAME]):
        pd.testing.assert_frame_equal(concat(frames), pd.concat([FRAME, FRAME]))
    pd.testing.assert_frame_equal(merge_chunk(p, q, on=["k"], result_meta=FRAME.merge(FRAME, on="k").iloc[:0]),
                                  FRAME.merge(FRAME, on="k"))  # fmt: skip
    pd.testing.assert_frame_equal(make_meta(p), FRAME.iloc[:0])
    assert len(meta_nonempty(p)) == 2
    assert (hash_object_dispatch(p) == hash_object_dispatch(FRAME)).all()
    parts = group_split_dispatch(p, np.array([0, 1, 0, 1]), 2, ignore_index=False)
    pd.testing.assert_frame_equal(parts[0], FRAME.iloc[[0, 2]])
    assert categorical_dtype(p, categories=["a"]) == pd.CategoricalDtype(["a"])
    result = dd.from_pandas(FRAME, npartitions=2).map_partitions(lambda _: asproxy(FRAME), meta=FRAME)
    assert len(result.compute(scheduler="sync")) == 8


@ARRAYS
@pytest.mark.parametrize("serializers", [None, ("cuda", "dask", "pickle", "error"), ("pickle",)])
def test_it_is_sent_as_its_object(kind: str, serializers: Any) -> None:
    a = array(kind)
    p = Stored(a).proxy()
    headers = [serialize(x, serializers=serializers, on_error="raise")[0] for x in (p, a)]
    assert headers[0]["serializer"] == headers[1]["serializer"]
    assert pickle.loads(headers[0].get("type-serialized", pickle.dumps(type(a)))) is type(a)
    for value in (p, [p, 1], {"x": p}):
        header, frames = serialize(value, serializers=serializers, on_error="raise")
        assert b"hpcgpu.spill" not in repr(header).encode()
        back = deserialize(header, frames)
        back = back if value is p else back[0] if isinstance(value, list) else back["x"]
        assert type(back) is type(a)
        np.testing.assert_array_equal(host(back), host(a))


def test_cuda_serializers_of_the_class_are_used() -> None:
    cuda_serialize.register(Record, lambda x: ({"name": x.name}, [b"on the device"]))
    cuda_deserialize.register(Record, lambda header, frames: Record(header["name"], bytes(frames[0])))
    header, frames = serialize(Stored(Record("r", 1)).proxy(), serializers=("cuda", "dask", "pickle"))
    assert header["serializer"] == "cuda"
    assert deserialize(header, frames) == Record("r", b"on the device")
