"""Copies through page-locked memory: the pool and the order of pieces; on a real GPU, Buffers of cuda.core and CuPy."""

from __future__ import annotations

import gc
import itertools
import pickle
import sys

import numpy as np
import pytest
from dask.utils import Dispatch
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.cuda import BufferView, CoreBuffers
from hpcgpu.spill.devices.cupy import CupyView
from hpcgpu.spill.devices.lookup import device_of, is_device_array
from hpcgpu.spill.storage.buffer_pool import PinnedPool, is_pinned, pieces, pipelined
from hpcgpu.spill.store.dask import register_cupy

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
    for view in (CupyView((2, 3), record, (36, 12), 24), BufferView(100)):
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
    register_cupy(one, other)
    assert ("cupy" in one._lazy, "cupy" in other._lazy) == (True, True)
    assert ("cupy" in sys.modules) == before
