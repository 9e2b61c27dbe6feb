"""Registers the store's types, and the wire format of CuPy's arrays, with dask."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
from dask.sizeof import sizeof

from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.libraries import ArrayView
from hpcgpu.spill.store import Handle, Packed, read_mode


@functools.cache
def register() -> None:
    """Register handles and CuPy's arrays with dask, in this process: without it each handle would count 64 bytes."""
    sizeof.register(Handle, lambda handle: handle.nbytes)
    sizeof.register(Packed, lambda packed: packed.nbytes)
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    register_cupy(dask_serialize, dask_deserialize)


def register_cupy(dask_serialize: Any, dask_deserialize: Any) -> None:
    """Let CuPy's arrays travel: between workers by UCX as their bytes, elsewhere as CuPy pickles them."""
    # distributed's own pair of functions needs numba or RMM, and fails without them, also in a client without this
    # package (distributed 2026.8.0, protocol/cupy.py). If its cuda family comes first (UCX), and numba is installed,
    # its pair replaces this one: each reads messages of the other. CuPy is imported with the first array.

    def add() -> None:
        import cupy

        dask_serialize.register(cupy.ndarray, serialize)
        dask_deserialize.register(cupy.ndarray, deserialize)

    dask_serialize.register_lazy("cupy", add)
    dask_deserialize.register_lazy("cupy", add)


def serialize(array: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the layout of an array, made contiguous, and its host bytes; NotImplementedError if not for a worker."""
    import cupy

    with cupy.cuda.Device(array.device.id) as device:
        mode = read_mode()
        if mode is None or not mode.to_worker:
            device.synchronize()  # any stream may write to it; CuPy's copy waits for the current stream only
            raise NotImplementedError
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = cupy.ascontiguousarray(array)
        root = np.empty(0, np.uint8)
        if array.nbytes:
            copies = CudaDevice.current(array.device.id).copies
            root = copies.to_host(int(array.data.ptr), array.nbytes, lambda nbytes: np.empty(nbytes, np.uint8))
    layout = {"shape": array.shape, "strides": array.strides, "typestr": array.dtype.str}
    return {**layout, "dtype": pickle.dumps(array.dtype)}, [root.data]  # bfloat16 and records have no typestr


def deserialize(header: dict[str, Any], frames: list[Any]) -> Any:
    """Return the array, on this process's current device."""
    import cupy

    root = np.frombuffer(frames[0], np.uint8) if frames else np.empty(0, np.uint8)
    dtype = pickle.loads(header["dtype"]) if "dtype" in header else np.dtype(header["typestr"])
    device = CudaDevice.current(int(cupy.cuda.runtime.getDevice()))
    (array,) = device.unpack(root, [ArrayView("cupy", tuple(header["shape"]), dtype, tuple(header["strides"]), 0)])
    return array
