"""The device of an array: what carries ``__hpcgpu_device__`` says it itself, CuPy and cuda.core have adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


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
    kind = type(x)
    if hasattr(kind, "__hpcgpu_device__"):
        device: Device = x.__hpcgpu_device__
        return device
    if _is_cupy(kind):
        from hpcgpu.spill.cuda import CudaDevice

        return CudaDevice.current(x.device.id)
    if _is_core(kind) and _is_movable(x):
        from hpcgpu.spill.cuda import CudaDevice

        return CudaDevice.current(x.device_id)
    return None


def is_device_array(x: Any) -> bool:  # noqa: ANN401
    """Tell whether an object lies in device memory."""
    kind: type = type(x)
    return _is_on_device(kind) or (_is_core(kind) and _is_movable(x))


@functools.lru_cache(256)
def _is_on_device(kind: type) -> bool:
    return hasattr(kind, "__hpcgpu_device__") or _is_cupy(kind)


def _is_cupy(kind: type) -> bool:
    # by name, so that nothing of CuPy is imported where it is not used; its classes say "cupy", "cupy._core.core"
    return kind.__name__ == "ndarray" and kind.__module__.split(".")[0] == "cupy"


def _is_core(kind: type) -> bool:
    # cuda-core 1.2.2 says "cuda.core._memory._buffer", versions before 1.0 "cuda.core.experimental._memory..."
    return kind.__name__ == "Buffer" and kind.__module__.startswith("cuda.core.")


def _is_movable(buffer: Any) -> bool:  # noqa: ANN401
    """Tell whether a Buffer of cuda.core is in memory of a device, and of this process."""
    return bool(buffer.size) and not buffer.is_mapped and not buffer.is_host_accessible
