"""cuDF's own buffers and serialization, by the store's copies; another class stands for RMM's DeviceBuffer."""

import numpy as np
import pytest
from cupy_arrays import DeviceBuffer, content, filled, frame_class

from hpcgpu.spill.devices.cuda import CudaDevice

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [1000, 3 * MIB])
def test_cudf_frames_go_through_the_stores_copies(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel on a non-blocking stream is waited for, and other bytes than those of the frames are left alone."""
    import cupy

    kind = frame_class(monkeypatch)
    first, second, stream = DeviceBuffer(nbytes), DeviceBuffer(77), cupy.cuda.Stream(non_blocking=True)
    source, other = filled(nbytes, 7), filled(77, 9)
    cupy.cuda.Device(0).synchronize()
    first.memory.copy_from_device_async(source.data, nbytes, stream)
    second.memory.copy_from_device_async(other.data, 77, stream)
    values = kind(first, second, DeviceBuffer(0), label=b"name")
    device = CudaDevice.current(0)
    ((root, views),) = device.pack([[values]], lambda n: np.full(n, 255, "u1"))
    assert root.nbytes == nbytes + 77 + 4
    (back,) = device.unpack(root, views)
    root[:] = 255  # the store uses host memory again
    assert content(back) == [(nbytes, {7}), (77, {9})]
    assert (type(back), back.label, back.buffers[2].nbytes) == (kind, b"name", 0)
