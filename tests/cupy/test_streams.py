"""Kernels of users still run when their task is over: nobody may write to what they read."""

import gc
from typing import Any

import numpy as np
import pytest
from cupy_arrays import filled
from spill_stores import NewStore, put
from waiting import scaled

from hpcgpu.spill import GpuSpillBuffer

MIB = 1 << 20


@pytest.fixture
def store(new_store: NewStore) -> GpuSpillBuffer:
    """A store in which ``a`` came up again: it is clean, its copy in host memory is kept."""
    store = new_store(4 * MIB)
    put(store, ("a", *range(5)), lambda key: filled(MIB, 7))
    for i in range(5):
        del store[i]
    with store.handing_out_handles(to_worker=False):
        handle = store["a"]
    with store.using(["a"]):
        handle.resolve()
    del handle
    gc.collect()
    assert store.copy_bytes == MIB
    return store


def read_later(store: GpuSpillBuffer, stream: Any) -> Any:
    """A task whose kernel on a stream of its own reads ``a``; here it is a copy."""
    import cupy

    result = cupy.empty(MIB, "u1")
    with store.handing_out_handles(to_worker=False):
        a = store["a"]
    with store.using(["a"]):
        result.data.copy_from_device_async(a.data, MIB, stream)
    return result


def touch(store: GpuSpillBuffer, *keys: object) -> None:
    with store.handing_out_handles(to_worker=False):
        for key in keys:
            store[key]


def test_a_clean_value_goes_when_kernels_have_read_it(store: GpuSpillBuffer) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    result = read_later(store, stream)
    moved = store.counters["device_to_host"].number
    keys = range(10, 14)
    for key in keys:
        store[key] = filled(MIB, key)
        touch(store, *range(10, key + 1))
    assert store.settle(scaled(30))
    assert store.counters["device_to_host"].number == moved
    assert store.copy_bytes == 0  # it went without a copy
    new = [filled(MIB, 99) for _ in range(6)]
    stream.synchronize()
    np.testing.assert_array_equal(result.get(), np.full(MIB, 7, "u1"))
    del new


def test_a_clean_value_makes_room_for_an_allocation(
    store: GpuSpillBuffer, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    result = read_later(store, stream)
    cupy.get_default_memory_pool().free_all_blocks()
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(driver.count("device")))
    moved = store.counters["device_to_host"].number
    new = filled(MIB, 99)
    assert store.copy_bytes == 0
    assert store.counters["device_to_host"].number == moved
    np.testing.assert_array_equal(result.get(), np.full(MIB, 7, "u1"))
    assert int(new.get()[3]) == 99
