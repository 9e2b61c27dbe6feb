"""CuPy's arrays, as the store takes devices."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np


class View(NamedTuple):
    """How an array lies in its buffer."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    offset: int


class CupyDevice:
    """One CUDA device, through CuPy's memory pool."""

    def __init__(self, number: int) -> None:
        import cupy

        self.number = number
        with cupy.cuda.Device(number):
            self.memory_bytes = int(cupy.cuda.runtime.memGetInfo()[1])
        self.name = f"CUDA device {number}"
        self.on_alloc_failure: Callable[[int], bool] | None = None
        self._allocate = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(self._allocate_or_evict)

    @classmethod
    @functools.cache
    def current(cls, number: int) -> Self:
        """Return the one object for a device."""
        return cls(number)

    @property
    def used_bytes(self) -> int:
        """Bytes that arrays hold in CuPy's pool."""
        import cupy

        with cupy.cuda.Device(self.number):
            return int(cupy.get_default_memory_pool().used_bytes())

    def buffer_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and size of the array's allocation."""
        return int(array.data.mem.ptr), int(array.data.mem.size)

    def pack(
        self, arrays: Sequence[Any], empty: Callable[[int], np.ndarray] | None = None
    ) -> tuple[np.ndarray, list[View]]:
        """Copy the one allocation that all the arrays share to pinned host memory, of CuPy's own pool."""
        del empty
        import cupy

        memory = arrays[0].data.mem
        views = [View(a.shape, a.dtype.str, a.strides, int(a.data.ptr - memory.ptr)) for a in arrays]
        if not memory.size:
            return np.empty(0, np.uint8), views
        pinned = cupy.cuda.alloc_pinned_memory(memory.size)
        root = np.frombuffer(pinned, np.uint8, memory.size)
        with cupy.cuda.Device(self.number) as device:
            device.synchronize()  # the copy waits for no kernel on a non-blocking stream
            cupy.cuda.MemoryPointer(memory, 0).copy_to_host(ctypes.c_void_p(root.ctypes.data), memory.size)
        return root, views

    def unpack(self, root: np.ndarray, views: Sequence[View]) -> list[Any]:
        """Copy a packed allocation to the device and return its arrays."""
        import cupy

        with cupy.cuda.Device(self.number):
            pointer = cupy.cuda.alloc(root.nbytes)
            if root.nbytes:
                pointer.copy_from_host(ctypes.c_void_p(root.ctypes.data), root.nbytes)
        return [cupy.ndarray(v.shape, v.dtype, pointer + v.offset, v.strides) for v in views]

    def _allocate_or_evict(self, nbytes: int) -> Any:  # noqa: ANN401
        import cupy

        try:
            return self._allocate(nbytes)
        except cupy.cuda.memory.OutOfMemoryError:
            if self.on_alloc_failure is None or not self.on_alloc_failure(nbytes):
                raise
            cupy.get_default_memory_pool().free_all_blocks()
            return self._allocate(nbytes)

    def __reduce__(self) -> tuple[Callable[[int], CupyDevice], tuple[int]]:
        return CupyDevice.current, (0,)  # CUDA_VISIBLE_DEVICES names the receiving worker's own GPU first
