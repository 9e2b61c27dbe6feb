"""Copies through page-locked memory: the pool and the order of pieces; on a real GPU, Buffers of cuda.core and CuPy."""

from __future__ import annotations

import gc
import importlib
import itertools
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dask.utils import Dispatch
from distributed.protocol import deserialize, serialize
from distributed.protocol.serialize import dask_loads
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import SpillError
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.cuda import BufferView, CoreBuffers
from hpcgpu.spill.cupy import View, register
from hpcgpu.spill.devices import device_of, is_device_array
from hpcgpu.spill.pinned import PinnedPool, is_pinned, pieces, pipelined
from hpcgpu.spill.reading import Reader, reading

MIB = 1 << 20


def filled(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


class Lender:
    """Gives memory, and notes what it gave."""

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        self.given: list[int] = []
        self.most_bytes = most_bytes

    def __call__(self, nbytes: int) -> np.ndarray:
        if sum(self.given) + nbytes > self.most_bytes:
            raise MemoryError
        self.given.append(nbytes)
        return filled(nbytes)


def test_memory_of_one_size_class_is_used_again() -> None:
    lender = Lender()
    pool = PinnedPool(10 * MIB, lender)
    first = pool.take(MIB)
    assert first is not None and first.nbytes == MIB and is_pinned(first)
    address = first.ctypes.data
    del first
    assert pool.free_bytes == MIB
    again = pool.take(MIB - 5)
    assert again is not None and again.nbytes == MIB - 5
    assert again.ctypes.data == address
    assert lender.given == [MIB]


def test_memory_is_lent_as_long_as_a_view_lives() -> None:
    pool = PinnedPool(MIB, filled)
    array = pool.take(MIB)
    assert array is not None
    view = array[10:20]
    assert not is_pinned(view)  # the driver would be told of a part only
    del array
    gc.collect()
    assert pool.take(MIB) is None
    del view
    assert pool.take(MIB) is not None


def test_at_the_limit_there_is_none() -> None:
    pool = PinnedPool(2 * MIB, filled)
    kept = pool.take(2 * MIB)
    assert pool.take(MIB) is None
    del kept
    assert pool.take(MIB) is not None  # what is free in another size makes room
    assert pool.held_bytes == MIB


def test_a_system_without_more_is_not_asked_again() -> None:
    lender = Lender(MIB)
    pool = PinnedPool(10 * MIB, lender)
    one = pool.take(MIB)
    assert pool.take(MIB) is None
    lender.most_bytes *= 10
    assert pool.take(MIB) is None
    assert pool.held_bytes == MIB
    del one
    assert pool.take(MIB) is not None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3 * MIB)), max_size=30))
def test_the_pool_stays_within_its_limit(steps: list[tuple[bool, int]]) -> None:
    pool = PinnedPool(5 * MIB, filled)
    lent: list[np.ndarray] = []
    for take, nbytes in steps:
        if take:
            array = pool.take(nbytes)
            if array is not None:
                assert array.nbytes == nbytes
                lent.append(array)
        elif lent:
            lent.pop(nbytes % len(lent))
        taken = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in lent)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
        assert sum(a.nbytes for a in lent) <= pool.held_bytes - pool.free_bytes
        assert pool.held_bytes <= 5 * MIB


@given(st.integers(0, 1000), st.integers(1, 300))
def test_pieces_cover_everything_once(nbytes: int, size: int) -> None:
    parts = list(pieces(nbytes, size))
    assert [i for p in parts for i in range(p.start, p.stop)] == list(range(nbytes))
    assert all(p.stop - p.start <= size for p in parts)


@given(st.binary(max_size=500), st.integers(1, 100), st.integers(1, 4))
def test_a_stage_is_empty_before_it_is_filled_again(data: bytes, size: int, stages: int) -> None:
    """Like a device that delivers as late as it may: at ``start`` nothing is in the stage, only at ``finish``."""
    source, target = np.frombuffer(data, np.uint8), np.zeros(len(data), np.uint8)
    under_way: dict[int, slice] = {}
    most = 0

    def start(stage: int, part: slice) -> None:
        nonlocal most
        assert stage not in under_way
        under_way[stage] = part
        most = max(most, len(under_way))

    def finish(stage: int, part: slice) -> None:
        assert under_way.pop(stage) == part
        target[part] = source[part]

    pipelined(pieces(len(data), size), range(stages), start, finish)
    np.testing.assert_array_equal(target, source)
    assert not under_way
    assert most == min(stages, -(-len(data) // size))


def test_views_travel_to_peers() -> None:
    record = np.dtype([("x", "<f4"), ("n", "<i8")])
    for view in (View((2, 3), record, (36, 12), 24), BufferView(100)):
        assert pickle.loads(pickle.dumps(view)) == view


def test_a_host_array_is_on_no_device() -> None:
    assert not is_device_array(np.zeros(3))
    assert device_of(np.zeros(3)) is None
    assert not is_device_array(memoryview(b"abc"))


def test_buffers_without_the_driver_say_what_to_install() -> None:
    class Other:
        memory_bytes = 0

    with pytest.raises(SpillError, match="cuda-core"):
        CoreBuffers(Other())  # type: ignore[arg-type]


def test_registering_imports_no_cupy() -> None:
    before = "cupy" in sys.modules  # true where a test on a GPU came first
    one, other = Dispatch("serialize"), Dispatch("deserialize")
    register(one, other)
    assert ("cupy" in one._lazy, "cupy" in other._lazy) == (True, True)
    assert ("cupy" in sys.modules) == before


# from here on a GPU is needed


@pytest.fixture
def core() -> Any:
    module = pytest.importorskip("cuda.core", reason="no cuda.core here")
    try:
        module.Device(0).set_current()
    except Exception as why:  # what the loader of the driver raises is of no public class
        pytest.skip(f"no GPU here: {why}")
    return module


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GpuSpillBuffer]:
    made = GpuSpillBuffer(8 * MIB, 24 * MIB, str(tmp_path))
    yield made
    made.close()


def host_bytes(core: Any, buffer: Any) -> np.ndarray:
    stream = core.Device(0).create_stream()
    pinned = core.LegacyPinnedMemoryResource().allocate(buffer.size)
    buffer.copy_to(pinned, stream=stream)
    stream.sync()
    return np.from_dlpack(pinned).view(np.uint8).copy()


@pytest.mark.gpu
def test_buffers_go_through_every_tier(core: Any, store: GpuSpillBuffer) -> None:
    device = core.Device(0)
    stream = device.create_stream()
    for i in range(40):
        buffer = device.allocate(2 * MIB, stream=stream)
        buffer.fill(i, stream=stream)  # not waited for: the store does
        store[i] = [buffer]
    del buffer
    assert store.settle(60)
    assert 0 < store.tiers["device"] <= 8 * MIB
    assert store.tiers["disk"] > 0
    for i in range(40):
        (back,) = store[i]
        assert type(back) is core.Buffer
        assert back.size == 2 * MIB
        np.testing.assert_array_equal(host_bytes(core, back), np.full(2 * MIB, i, np.uint8))


@pytest.mark.gpu
def test_memory_of_buffers_is_given_back(core: Any, store: GpuSpillBuffer) -> None:
    device = core.Device(0)
    stream = device.create_stream()
    first = device.allocate(MIB, stream=stream)
    cuda = device_of(first)
    assert cuda is not None
    assert cuda.buffer_of(first)[1] == MIB
    gc.collect()
    before = cuda.used_bytes
    for i in range(30):
        store[i] = device.allocate(MIB, stream=stream)
    assert store.settle(60)
    for i in range(30):
        assert store[i].size == MIB
    store.clear()
    gc.collect()
    device.sync()
    assert cuda.used_bytes == before


@pytest.mark.gpu
def test_host_buffers_are_left_alone(core: Any) -> None:
    assert not is_device_array(core.LegacyPinnedMemoryResource().allocate(MIB))


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1, 4096, MIB, 8 * MIB, 8 * MIB + 1, 100 * MIB + 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_of_every_size(core: Any, nbytes: int, pinned: bool) -> None:
    copies = importlib.import_module("hpcgpu.spill.copies").DriverCopies(0)
    if not pinned:
        copies._host.limit_bytes = 0
    expected = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    stream = core.Device(0).create_stream()
    buffer = core.Device(0).allocate(nbytes, stream=stream)
    copies.to_device(expected, int(buffer.handle), int(stream.handle))
    down = copies.to_host(int(buffer.handle), nbytes, lambda n: np.empty(n, np.uint8))
    assert is_pinned(down) == (pinned and nbytes >= MIB)
    np.testing.assert_array_equal(down, expected)
    copies.to_device(down, int(buffer.handle), int(stream.handle))
    np.testing.assert_array_equal(host_bytes(core, buffer), expected)


@pytest.fixture
def cupy() -> Any:
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    module = pytest.importorskip("cupy", reason="no CuPy here")
    try:
        module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as why:
        pytest.skip(f"no GPU here: {why}")
    register(dask_serialize, dask_deserialize)
    return module


@pytest.mark.gpu
@pytest.mark.parametrize("make", ["C", "F", "strided", "reversed", "empty", "0-d", "records"])
@pytest.mark.parametrize("to_worker", [True, False])
def test_cupy_arrays_travel(cupy: Any, make: str, to_worker: bool) -> None:
    base = cupy.arange(60.0).reshape(6, 10)
    array = {
        "C": lambda: base,
        "F": lambda: cupy.asfortranarray(base),
        "strided": lambda: base[::2, 3:],
        "reversed": lambda: base[::-1],
        "empty": lambda: base[:0],
        "0-d": lambda: base.sum(),
        "records": lambda: cupy.asarray(np.array([(1, 2.5), (3, 4.5)], "i4,f8")),
    }[make]()
    with reading(Reader(to_worker=True) if to_worker else None):
        header, frames = serialize(array, on_error="raise")
    assert header["serializer"] == ("dask" if to_worker else "pickle")  # other processes know no pair of ours
    back = deserialize(header, [memoryview(bytes(f)) for f in frames])
    assert type(back) is cupy.ndarray
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back.get(), array.get())


@pytest.mark.gpu
def test_arrays_of_distributeds_own_pair_arrive(cupy: Any) -> None:
    sent = np.arange(6.0).reshape(2, 3)
    header = {"shape": (2, 3), "typestr": "<f8", "strides": (24, 8), "version": 3, "data": (1, False)}
    back = dask_loads(
        {"sub-header": header, "type-serialized": pickle.dumps(cupy.ndarray)}, [memoryview(sent.tobytes())]
    )
    np.testing.assert_array_equal(back.get(), sent)
