"""Values in Dask's messages: sizes of handles, and CuPy's arrays, on the device (UCX), in host memory or pickled."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
from dask.sizeof import sizeof
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.libraries import ArrayView
from hpcgpu.spill.store import Handle, Packed, read_mode


@functools.cache
def register() -> None:
    """Register handles and CuPy's arrays with Dask in this process; CuPy is imported with its first array."""
    sizeof.register(Handle, lambda handle: handle.nbytes)  # Dask would count 64 bytes
    sizeof.register(Packed, lambda packed: packed.nbytes)
    # distributed's own functions (2026.8.0, protocol/cupy.py) need numba or RMM, also in a client without this package,
    # and with numba records and bfloat16 lose their dtype. If cupyx's arrays come, its functions take the place of
    # these: each read messages of the other.

    def add() -> None:
        import cupy

        cuda_serialize.register(cupy.ndarray, to_device_frame)
        cuda_deserialize.register(cupy.ndarray, from_device_frame)
        dask_serialize.register(cupy.ndarray, to_host_frame)
        dask_deserialize.register(cupy.ndarray, from_host_frame)

    for dispatch in (cuda_serialize, cuda_deserialize, dask_serialize, dask_deserialize):
        dispatch.register_lazy("cupy", add)


def _contiguous(array: Any) -> tuple[dict[str, Any], Any]:
    """Return the layout of an array, made contiguous on its device, and that array."""
    import cupy

    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        with cupy.cuda.Device(array.device.id):
            array = cupy.ascontiguousarray(array)
    layout = {"shape": array.shape, "strides": array.strides, "typestr": array.dtype.str}
    return {**layout, "dtype": pickle.dumps(array.dtype)}, array  # bfloat16 and records have no typestr


def _dtype(header: dict[str, Any]) -> np.dtype[Any]:
    return pickle.loads(header["dtype"]) if "dtype" in header else np.dtype(header["typestr"])


def to_device_frame(array: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the layout of an array, made contiguous, and its memory as bytes."""
    import cupy

    header, array = _contiguous(array)
    return header, [cupy.ndarray((array.nbytes,), np.uint8, memptr=array.data)]


def from_device_frame(header: dict[str, Any], frames: list[Any]) -> Any:
    """Return the array in the memory of its frame."""
    import cupy

    (frame,) = frames
    return cupy.ndarray(header["shape"], _dtype(header), memptr=cupy.asarray(frame).data, strides=header["strides"])


def to_host_frame(array: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the layout of an array, made contiguous, and its host bytes; NotImplementedError if not for a worker."""
    import cupy

    with cupy.cuda.Device(array.device.id) as device:
        mode = read_mode()
        if mode is None or not mode.to_worker:
            device.synchronize()  # any stream may write to it; CuPy's copy waits for the current stream only
            raise NotImplementedError
        header, array = _contiguous(array)
        root = np.empty(0, np.uint8)
        if array.nbytes:
            copies = CudaDevice.current(array.device.id).copies
            root = copies.to_host(int(array.data.ptr), array.nbytes, lambda nbytes: np.empty(nbytes, np.uint8))
    return header, [root.data]


def from_host_frame(header: dict[str, Any], frames: list[Any]) -> Any:
    """Return the array, on this process's current device."""
    import cupy

    root = np.frombuffer(frames[0], np.uint8) if frames else np.empty(0, np.uint8)
    device = CudaDevice.current(int(cupy.cuda.runtime.getDevice()))
    view = ArrayView("cupy", tuple(header["shape"]), _dtype(header), tuple(header["strides"]), 0)
    (array,) = device.unpack(root, [view])
    return array
