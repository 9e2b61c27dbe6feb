"""cuDF's own buffers and serialization, by the store's copies; another class stands for RMM's DeviceBuffer."""

from __future__ import annotations

import sys
from typing import Any

import cupy_arrays
import numpy as np
import pytest
from cupy_arrays import filled

from hpcgpu.spill.devices.cuda import CudaDevice

MIB = 1 << 20


class DeviceBuffer:
    """Memory of CuPy's, as RMM shows its own."""

    def __init__(self, size: int) -> None:
        import cupy

        self.memory, self.size = cupy.cuda.alloc(size), size
        self.ptr = int(self.memory.ptr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.ptr, False), "shape": (self.size,), "strides": None, "typestr": "|u1", "version": 3}


@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
def test_cudf_frames_go_through_the_stores_copies(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel on a non-blocking stream is waited for, and other bytes than those of the frames are left alone."""
    import cupy
    import rmm

    monkeypatch.setattr(rmm, "DeviceBuffer", DeviceBuffer)
    cudf = cupy_arrays.package(monkeypatch)

    class Values(sys.modules["cudf.core.abc"].Serializable):  # type: ignore[name-defined,misc]
        __module__ = "cudf.core.series"

        def __init__(self, *buffers: Any, label: bytes) -> None:
            self.buffers, self.label = buffers, label

        def memory_usage(self) -> int:
            return sum(b.nbytes for b in self.buffers)

        def serialize(self) -> tuple[dict[str, Any], list[Any]]:
            return {}, [*self.buffers, memoryview(self.label)]

        @classmethod
        def deserialize(cls, header: dict[str, Any], frames: list[Any]) -> Values:
            return cls(*frames[:-1], label=bytes(frames[-1]))

    def buffer(memory: DeviceBuffer) -> Any:
        return cudf.core.buffer.as_buffer(memory)

    def content(values: Values) -> list[tuple[int, set[int]]]:
        copies = CudaDevice.current(0).copies
        roots = [copies.to_host(b.ptr, b.nbytes, lambda n: np.empty(n, "u1")) for b in values.buffers if b.nbytes]
        return [(root.nbytes, set(root.tolist())) for root in roots]

    first, second, stream = DeviceBuffer(nbytes), DeviceBuffer(77), cupy.cuda.Stream(non_blocking=True)
    source, other = filled(nbytes, 7), filled(77, 9)
    cupy.cuda.Device(0).synchronize()
    first.memory.copy_from_device_async(source.data, nbytes, stream)
    second.memory.copy_from_device_async(other.data, 77, stream)
    values = Values(buffer(first), buffer(second), buffer(DeviceBuffer(0)), label=b"name")
    device = CudaDevice.current(0)
    ((root, views),) = device.pack([[values]], lambda n: np.full(n, 255, "u1"))
    assert root.nbytes == nbytes + 77 + 4
    (back,) = device.unpack(root, views)
    root[:] = 255  # the store uses host memory again
    assert content(back) == [(nbytes, {7}), (77, {9})]
    assert (type(back), back.label, back.buffers[2].nbytes) == (Values, b"name", 0)
