"""CuPy's own arrays and allocator hooks, over memory of the driver that stands in (``support/fake_cuda.c``).

CuPy asks the CUDA runtime for the device, the stream and memory; the runtime does not take the stand-in for a driver,
so that these few names are replaced. Arrays, views, pointers and the chain of allocators are CuPy's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import Standin

from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.copies import DriverCopies
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.lookup import device_of
from hpcgpu.spill.store.cupy_messages import deserialize, serialize
from hpcgpu.spill.store.read_mode import ReadMode, reading

MIB = 1 << 20


class Runtime:
    """What CuPy would have of the runtime, from the driver."""

    def __init__(self, cupy: Any, copies: DriverCopies) -> None:
        self.cupy, self.copies, self.used_bytes = cupy, copies, 0

    def malloc(self, nbytes: int) -> Any:
        """As the pool's: memory of the device, or CuPy's own error."""
        try:
            owner = Owner(self, nbytes)
        except MemoryError:
            raise self.cupy.cuda.memory.OutOfMemoryError(nbytes, self.used_bytes) from None
        memory = self.cupy.cuda.UnownedMemory(owner.pointer, nbytes, owner, 0)
        return self.cupy.cuda.MemoryPointer(memory, 0)

    def alloc(self, nbytes: int) -> Any:
        return self.cupy.cuda.get_allocator()(nbytes)

    def device(self, number: int) -> Any:
        assert number == 0
        return self.copies.context()

    def asarray(self, host: np.ndarray) -> Any:
        pointer = self.alloc(host.nbytes)
        if host.nbytes:
            order = "F" if host.flags.f_contiguous else "C"
            self.copies.to_device(np.frombuffer(host.tobytes(order), np.uint8), int(pointer.ptr), 0)
        return self.cupy.ndarray(host.shape, host.dtype, pointer, host.strides)


class Owner:
    """Memory of the device, as long as CuPy's arrays are in it."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self.pointer, self.runtime, self.nbytes = 0, runtime, nbytes
        with runtime.copies.context():
            self.pointer = int(runtime.copies.call("cuMemAlloc", nbytes)) if nbytes else 0
        runtime.used_bytes += nbytes

    def __del__(self) -> None:
        if self.pointer:
            self.runtime.used_bytes -= self.nbytes
            with self.runtime.copies.context():
                self.runtime.copies.call("cuMemFree", self.pointer)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    cupy = pytest.importorskip("cupy", reason="no CuPy here")
    try:
        Standin()
    except (OSError, AttributeError):
        pytest.skip("of the stand-in for a driver alone (tests/ucx/test_cuda_driver.py runs them)")
    copies = CudaDevice.current(0).copies
    assert isinstance(copies, DriverCopies)
    made = Runtime(cupy, copies)
    assert cupy.cuda.Device(0).id == 0
    pool = SimpleNamespace(used_bytes=lambda: made.used_bytes, free_all_blocks=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda, "Device", made.device)
        patch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
        patch.setattr(cupy.cuda, "alloc", made.alloc)
        patch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=0))
        patch.setattr(cupy, "get_default_memory_pool", lambda: pool)
        cupy.cuda.set_allocator(made.malloc)
        yield made


def host(array: Any) -> np.ndarray:
    device = device_of(array)
    assert device is not None
    root, (view,) = device.pack([array], lambda nbytes: np.empty(nbytes, np.uint8))
    return np.ndarray(view.shape, view.dtype, root, view.offset, view.strides)


def test_names_of_one_array_come_back_as_one(runtime: Runtime, tmp_path: Path) -> None:
    expected = np.arange(100_000.0).reshape(200, 500)
    x = runtime.asarray(expected)
    store = GpuSpillBuffer(MIB, None, str(tmp_path))
    try:
        store["a"], store["b"], store["c"] = x, x.T, [x[::2, 3:], x]
        assert store.tiers["device"] == x.data.mem.size == expected.nbytes
        del x
        for i in range(4):
            store[i] = runtime.asarray(np.full(MIB // 2, i, "u1"))
        assert store.settle(60)
        assert store.counters["device_to_host"].number >= 1
        before = store.counters["host_to_device"].number
        a, b, (c, d) = store["a"], store["b"], store["c"]
        assert store.counters["host_to_device"].number == before + 1
        assert type(a) is runtime.cupy.ndarray
        assert len({v.data.mem.ptr for v in (a, b, c, d)}) == 1
        for found, right in [(a, expected), (b, expected.T), (c, expected[::2, 3:]), (d, expected)]:
            np.testing.assert_array_equal(host(found), right)
        del a, b, c, d, found
        store.clear()
        gc.collect()
        assert runtime.used_bytes == 0
    finally:
        store.close()


def test_cupys_own_error_makes_room(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(Standin().count("device") + 10 * MIB))
    store = GpuSpillBuffer(1.0, None, str(tmp_path))
    try:
        for i in range(12):
            store[i] = runtime.asarray(np.full(2 * MIB, i, "u1"))
        assert store.counters["device_to_host"].number >= 7
        assert [int(host(store[i])[5]) for i in range(12)] == list(range(12))
        with pytest.raises(runtime.cupy.cuda.memory.OutOfMemoryError):
            runtime.alloc(11 * MIB)
    finally:
        store.close()


@pytest.mark.parametrize("make", ["C", "F", "empty", "0-d", "records"])
def test_arrays_travel_to_workers(runtime: Runtime, make: str) -> None:
    base = np.arange(60.0).reshape(6, 10)
    records = np.array([(1, 2.5), (3, 4.5)], "i4,f8")
    sent = {"C": base, "F": np.asfortranarray(base), "empty": base[:0], "0-d": base.sum(), "records": records}[make]
    with reading(ReadMode(to_worker=True)):
        header, frames = serialize(runtime.asarray(np.asarray(sent)))
    back = deserialize(header, [memoryview(bytes(frame)) for frame in frames])
    assert type(back) is runtime.cupy.ndarray
    assert (back.dtype, back.shape) == (np.asarray(sent).dtype, np.asarray(sent).shape)
    np.testing.assert_array_equal(host(back), sent)
