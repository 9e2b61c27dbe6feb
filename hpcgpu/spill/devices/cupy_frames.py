"""CuPy's arrays in messages of UCX: their bytes on the device, as one frame."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np


def register(cuda_serialize: Any, cuda_deserialize: Any) -> None:
    """Let CuPy's arrays go from device to device; CuPy is imported with the first one."""
    # distributed's own pair (2026.8.0, protocol/cupy.py) needs numba, which no extra of ours has: without it no array
    # arrived, and with it records and bfloat16 lost their dtype. If cupyx's arrays come, its pair takes the place of
    # this one: each reads messages of the other.

    def add() -> None:
        import cupy

        cuda_serialize.register(cupy.ndarray, serialize)
        cuda_deserialize.register(cupy.ndarray, deserialize)

    cuda_serialize.register_lazy("cupy", add)
    cuda_deserialize.register_lazy("cupy", add)


def serialize(array: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return the layout of an array, made contiguous, and its memory as bytes."""
    import cupy

    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        with cupy.cuda.Device(array.device.id):
            array = cupy.ascontiguousarray(array)
    layout = {"shape": array.shape, "strides": array.strides, "typestr": array.dtype.str}
    frame = cupy.ndarray((array.nbytes,), np.uint8, memptr=array.data)
    return {**layout, "dtype": pickle.dumps(array.dtype)}, [frame]  # records and bfloat16 have no typestr


def deserialize(header: dict[str, Any], frames: list[Any]) -> Any:
    """Return the array in the memory of its frame."""
    import cupy

    (frame,) = frames
    dtype = pickle.loads(header["dtype"]) if "dtype" in header else np.dtype(header["typestr"])
    return cupy.ndarray(header["shape"], dtype, memptr=cupy.asarray(frame).data, strides=header["strides"])
