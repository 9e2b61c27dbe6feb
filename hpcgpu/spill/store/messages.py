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
from hpcgpu.spill.store.handles import Handle, Packed, read_mode


@functools.cache
def register() -> None:
    """Register handles and CuPy's arrays with Dask in this process; CuPy is imported with its first array."""
    sizeof.register(Handle, lambda handle: handle.nbytes)  # Dask would count 64 bytes
    sizeof.register(Packed, lambda packed: packed.nbytes)

    @sizeof.register_lazy("jaxlib")
    def add_jax() -> None:
        import jax  # type: ignore[import-not-found] # of no extra of ours

        sizeof.register(jax.Array, lambda array: int(array.nbytes))  # Dask 2026.8.0 counts Python's object alone

    # distributed's own (2026.8.0, protocol/cupy.py) need numba or RMM, and lose the dtype of records and bfloat16. They
    # take the place of these when an array of cupyx comes: each read messages of the other.

    def add() -> None:
        import cupy

        cuda_serialize.register(cupy.ndarray, to_device_frame)
        cuda_deserialize.register(cupy.ndarray, from_device_frame)
        dask_serialize.register(cupy.ndarray, to_host_frame)
        dask_deserialize.register(cupy.ndarray, from_host_frame)

    for dispatch in (cuda_serialize, cuda_deserialize, dask_serialize, dask_deserialize):
        dispatch.register_lazy("cupy", add)


def to_device_frame(array: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the layout of an array, made contiguous, and its memory as bytes."""
    import cupy

    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        with cupy.cuda.Device(array.device.id):
            array = cupy.ascontiguousarray(array)
    header = {"shape": array.shape, "strides": array.strides, "typestr": array.dtype.str}
    header["dtype"] = pickle.dumps(array.dtype)  # bfloat16 and records have no typestr
    return header, [cupy.ndarray((array.nbytes,), np.uint8, memptr=array.data)]


def from_device_frame(header: dict[str, Any], frames: list[Any]) -> Any:
    """Return the array in the memory of its frame."""
    import cupy

    memory = cupy.asarray(*frames).data
    dtype = pickle.loads(header["dtype"]) if "dtype" in header else np.dtype(header["typestr"])
    return cupy.ndarray(tuple(header["shape"]), dtype, memptr=memory, strides=tuple(header["strides"]))


def to_host_frame(array: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the layout of an array, made contiguous, and its host bytes; NotImplementedError if not for a worker."""
    import cupy

    with cupy.cuda.Device(array.device.id) as device:
        if not ((mode := read_mode()) and mode.to_worker):
            device.synchronize()  # any stream may write to it; CuPy's copy waits for the current stream only
            raise NotImplementedError
        header, (frame,) = to_device_frame(array)
        root = np.empty(frame.nbytes, np.uint8)
        if frame.nbytes:
            root = CudaDevice.current(array.device.id).copies.to_host(int(frame.data.ptr), frame.nbytes, lambda _: root)
    return header, [root.data]


def from_host_frame(header: dict[str, Any], frames: list[Any]) -> Any:
    """Return the array, on this process's current device."""
    import cupy

    root = np.frombuffer(frames[0], np.uint8) if frames else np.empty(0, np.uint8)
    device = CudaDevice.current(int(cupy.cuda.runtime.getDevice()))
    return from_device_frame(header, device.unpack(root, [ArrayView("cupy", root.shape, root.dtype, (1,), 0)]))
