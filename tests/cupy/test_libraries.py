"""Arrays of the other libraries beside CuPy's: as they come, on the stand-in for a driver."""

from __future__ import annotations

import numpy as np
from cupy_arrays import filled
from spill_stores import NewStore
from waiting import scaled

from hpcgpu.spill.devices.cuda import device_of

MIB = 1 << 20


def test_an_array_of_numba_comes_back(new_store: NewStore) -> None:
    from numba import cuda

    expected = np.arange(120_000.0).reshape(300, 400)
    store = new_store(MIB)
    store["x"] = cuda.to_device(np.asfortranarray(expected))
    for i in range(3):
        store[i] = filled(MIB // 2, i)
    assert store.settle(scaled(30))
    assert store.counters["device_to_host"].number >= 1
    back = store["x"]
    assert type(back).__name__ == "DeviceNDArray"
    np.testing.assert_array_equal(back.copy_to_host(), expected)


def test_a_buffer_of_cuda_core_comes_back(new_store: NewStore) -> None:
    from cuda import core

    device = core.Device(0)
    device.set_current()
    stream, store = device.create_stream(), new_store(MIB)
    buffer = device.allocate(MIB // 2, stream=stream)
    buffer.fill(7, stream=stream)
    store["x"] = buffer
    del buffer
    for i in range(3):
        store[i] = filled(MIB // 2, i)
    assert store.settle(scaled(30))
    assert store.counters["device_to_host"].number >= 1
    back = store["x"]
    gpu = device_of(back)
    assert gpu is not None
    assert set(gpu.pack([back], lambda nbytes: np.empty(nbytes, np.uint8))[0].tolist()) == {7}
