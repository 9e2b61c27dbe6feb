"""Copies through page-locked memory, and cuda.bindings and cuda.core on a stand-in for NVIDIA's driver."""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.cuda import CoreBuffers, device_of, is_device_array
from hpcgpu.spill.storage.disk import PinnedPool, is_pinned, pipelined
from hpcgpu.spill.store.messages import register

MIB = 1 << 20


def filled(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def test_memory_is_lent_as_long_as_a_view_lives() -> None:
    pool = PinnedPool(MIB, filled)
    array = pool.take(MIB)
    assert array is not None and array.nbytes == MIB and is_pinned(array)
    view = array[10:20]
    assert not is_pinned(view)  # the driver would copy a part only
    del array
    gc.collect()
    assert pool.take(MIB) is None
    del view
    assert pool.take(MIB) is not None


def test_pool_of_a_system_without_memory_tries_once() -> None:
    calls: list[int] = []

    def allocate(nbytes: int) -> np.ndarray:
        calls.append(nbytes)
        if len(calls) == 2:
            raise MemoryError
        return filled(nbytes)

    pool = PinnedPool(10 * MIB, allocate)
    one = pool.take(MIB)
    assert pool.take(MIB) is pool.take(MIB) is None
    assert pool._held_bytes == MIB
    del one
    assert pool.take(MIB) is not None and len(calls) == 2


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
        assert sum(a.nbytes for a in lent) <= pool._held_bytes - pool.free_bytes
        assert pool._held_bytes <= 5 * MIB


@given(st.binary(max_size=500), st.integers(1, 100), st.integers(1, 4))
def test_a_stage_is_empty_before_it_is_filled_again(data: bytes, size: int, stages: int) -> None:
    """Like a device that delivers as late as it may: at ``start`` nothing is in the stage, only at ``finish``.

    The parts cover everything once.
    """
    source, target = np.frombuffer(data, np.uint8), np.zeros(len(data), np.uint8)
    under_way: dict[int, slice] = {}
    begun: list[int] = []
    most = 0

    def start(stage: int, part: slice) -> None:
        nonlocal most
        assert stage not in under_way
        under_way[stage] = part
        begun.extend(range(part.start, part.stop))
        assert part.stop - part.start <= size
        most = max(most, len(under_way))

    def finish(stage: int, part: slice) -> None:
        assert under_way.pop(stage) == part
        target[part] = source[part]

    pipelined(len(data), size, range(stages), start, finish)
    np.testing.assert_array_equal(target, source)
    assert begun == list(range(len(data)))
    assert not under_way
    assert most == min(stages, -(-len(data) // size))


def test_a_host_array_is_on_no_device() -> None:
    assert not is_device_array(np.zeros(3))
    assert device_of(np.zeros(3)) is None
    assert not is_device_array(memoryview(b"abc"))


def test_buffers_without_the_driver_say_what_to_install() -> None:
    class Other:
        memory_bytes = 0
        copies = None

    with pytest.raises(SpillError, match="cuda-core"):
        CoreBuffers(Other())  # type: ignore[arg-type]


def test_registering_imports_no_cupy() -> None:
    before = "cupy" in sys.modules  # true where a test on a GPU came first
    register()
    assert ("cupy" in sys.modules) == before


def test_what_the_store_asks_of_driver_and_cuda_core(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="no cuda.core here: it comes with the extra dev")
    # one child for all of them: a process has one driver, and most of the time is that of imports
    files = ["spill/test_cuda_api.py", "spill/test_cuda_standin.py"]
    assert fake_cuda.not_passed(tmp_path, files, "-n", "0") == []
