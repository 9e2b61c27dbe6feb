"""CuPy alone, without cuda.bindings, as ``pip install cupy-cuda12x`` leaves it: CuPy makes the copies."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cupy_arrays import filled, on_host
from spill_stores import NewStore
from waiting import scaled

from hpcgpu.spill.devices import cuda
from hpcgpu.spill.devices.pools import CupyCopies

MIB = 1 << 20


@pytest.fixture(autouse=True)
def copies(driver: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CupyCopies]:
    import cupy

    made = CupyCopies(0)
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    monkeypatch.setattr(cuda, "_made", functools.cache(lambda number: cuda.CudaDevice(number, made)))
    yield made
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


def test_spilled_arrays_lock_no_pages(new_store: NewStore, driver: Any, copies: CupyCopies) -> None:
    arrays = [filled(3 * MIB, i) for i in range(24)]
    import cupy

    cupy.get_default_pinned_memory_pool().free_all_blocks()
    before, store = driver.count("pinned"), new_store(6 * MIB)
    while arrays:
        store[len(arrays)] = arrays.pop()
    assert store.settle(scaled(30))
    assert store.tiers["host"] >= 60 * MIB
    assert driver.count("pinned") == before
    assert copies.idle_bytes == 0
    assert [int(on_host(store[i])[7]) for i in range(24)] == list(range(24))


def test_an_array_without_elements_is_not_copied(copies: CupyCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    device = cuda.CudaDevice.current(0)
    ((root, views),) = device.pack([[cupy.asarray(np.empty(0, "f4"))]], lambda nbytes: np.empty(nbytes, np.uint8))
    (back,) = device.unpack(root, views)
    assert (root.nbytes, back.shape, back.dtype) == (0, (0,), np.dtype("f4"))


def test_a_copy_waits_for_kernels_on_all_streams(copies: CupyCopies) -> None:
    import cupy

    stream, source, x = cupy.cuda.Stream(non_blocking=True), filled(MIB, 7), filled(MIB, 1)
    x.data.copy_from_device_async(source.data, MIB, stream)
    root = copies.to_host(x.data.ptr, MIB, lambda nbytes: np.empty(nbytes, np.uint8))
    assert (root == 7).all()
