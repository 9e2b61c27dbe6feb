"""The device of an array: what carries ``__hpcgpu_device__`` says it itself, CuPy and cuda.core have adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from hpcgpu.spill import cudf


class Device(Protocol):
    """What the store needs of a GPU; a simulated one and a CUDA device look alike to it."""

    memory_bytes: int
    on_alloc_failure: Callable[[int], bool] | None

    @property
    def used_bytes(self) -> int:
        """Bytes that arrays hold."""

    def buffer_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return an id of the array's buffer, valid while it lives, and the buffer's bytes."""

    def pack(self, arrays: Sequence[Any], empty: Callable[[int], np.ndarray]) -> tuple[np.ndarray, list[Any]]:
        """Copy the buffer that the arrays share to the host, once; return it with how each lies in it.

        ``empty`` gives room in host memory; a device that needs memory of a kind of its own does not use it.
        """

    def unpack(self, root: np.ndarray, views: Sequence[Any]) -> list[Any]:
        """Copy a packed buffer to the device, once, and return its arrays."""


def device_of(x: Any) -> Device | None:  # noqa: ANN401
    """Return the device on which an object lives; None for what is no device array."""
    kind: type = type(x)
    family = _family(kind)
    if family == "device":
        device: Device = x.__hpcgpu_device__
        return device
    if not is_device_array(x):
        return None
    from hpcgpu.spill.cuda import CudaDevice

    # an object of cuDF is on the current device, which is the worker's own
    return CudaDevice.current(x.device.id if family == "cupy" else x.device_id if family == "core" else 0)


def is_device_array(x: Any) -> bool:  # noqa: ANN401
    """Tell whether an object lies in device memory, and is the store's to move."""
    kind: type = type(x)
    family = _family(kind)
    if family == "core":
        return _is_movable(x)
    return bool(family) and (family != "cudf" or not cudf.spills_itself())


def is_left_to_cudf(x: Any) -> bool:  # noqa: ANN401
    """Tell an object that cuDF itself spills."""
    return cudf.is_cudf(x) and cudf.spills_itself()


@functools.lru_cache(256)
def _family(kind: type) -> str:
    """Return whose objects these are; by name, so that nothing is imported where it is not used."""
    if hasattr(kind, "__hpcgpu_device__"):
        return "device"
    if kind.__name__ == "ndarray" and kind.__module__.split(".")[0] == "cupy":  # "cupy", "cupy._core.core"
        return "cupy"
    # cuda-core 1.2.2 says "cuda.core._memory._buffer", versions before 1.0 "cuda.core.experimental._memory..."
    if kind.__name__ == "Buffer" and kind.__module__.startswith("cuda.core."):
        return "core"
    return "cudf" if cudf.is_cudf_type(kind) else ""


def _is_movable(buffer: Any) -> bool:  # noqa: ANN401
    """Tell whether a Buffer of cuda.core is in memory of a device, and of this process."""
    return bool(buffer.size) and not buffer.is_mapped and not buffer.is_host_accessible
