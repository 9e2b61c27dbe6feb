"""CuPy's arrays, and copies by CuPy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices import Gpu, Kind, PlainCopies
from hpcgpu.spill.devices.allocation_failure import attached_gpu, with_room


class CupyView(NamedTuple):
    """The layout of an array in its buffer."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    offset: int
    library: str = "cupy"


def evict_on_failure() -> None:
    """Let failing allocations of CuPy's present allocator make the stores evict: user code and cuDF may set another."""
    import cupy

    allocate = cupy.cuda.get_allocator()
    if getattr(allocate, "func", None) is not _allocate_or_evict:
        with contextlib.suppress(ValueError):  # inside using_allocator; the next array comes from outside
            cupy.cuda.set_allocator(functools.partial(_allocate_or_evict, allocate))


def _allocate_or_evict(allocate: Callable[[int], Any], nbytes: int) -> Any:
    try:
        return allocate(nbytes)
    except MemoryError:
        import cupy

        device = attached_gpu(cupy.cuda.runtime.getDevice())
        if device is None:  # no store has values on it
            raise
        return with_room(device, nbytes, lambda: allocate(nbytes), device.give_back)


class CupyArrays(Kind):
    """CuPy's arrays on one device, in CuPy's pool, where failing allocations of all threads make the store evict."""

    def __init__(self, device: Gpu) -> None:
        import cupy

        self._device, self._cupy = device, cupy
        evict_on_failure()
        with cupy.cuda.Device(device.number):
            pool = cupy.get_default_memory_pool()
            if device.reserve_bytes and not pool.get_limit():  # nor has CUPY_GPU_MEMORY_LIMIT set one
                pool.set_limit(size=device.memory_bytes - device.reserve_bytes)

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and size of the array's allocation."""
        evict_on_failure()
        return int(array.data.mem.ptr), int(array.data.mem.size)

    def view_of(self, array: Any) -> CupyView:
        """Return the layout of the array in its allocation."""
        return CupyView(array.shape, array.dtype, array.strides, int(array.data.ptr - array.data.mem.ptr))

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on the calling thread's stream of CuPy, where freed memory may still be in use."""
        cuda = self._cupy.cuda
        with cuda.Device(device.number):
            pointer = cuda.alloc(nbytes)
            return pointer, int(pointer.ptr), int(cuda.get_current_stream().ptr)

    def array_of(self, memory: Any, view: CupyView) -> Any:
        """Return an array in allocated memory."""
        with self._cupy.cuda.Device(self._device.number):
            return self._cupy.ndarray(view.shape, view.dtype, memory + view.offset, view.strides)

    def used_bytes(self, device: Gpu) -> int:
        """Return the bytes that arrays hold in CuPy's pool."""
        with self._cupy.cuda.Device(device.number):
            return int(self._cupy.get_default_memory_pool().used_bytes())

    def give_back(self) -> bool:
        """Free the unused blocks of CuPy's pool; return whether there were any."""
        pool = self._cupy.get_default_memory_pool()
        before = pool.total_bytes()
        pool.free_all_blocks()
        return bool(pool.total_bytes() < before)


class CupyCopies(PlainCopies):
    """Copies by CuPy, without cuda.bindings, from and to ordinary memory; each waits for the whole device."""

    # not through CuPy's page-locked pool: it rounds up to a power of two, so it could lock twice the host tier, and
    # it has no limit (CuPy 14.2, pinned_memory.pyx)

    def __init__(self, number: int) -> None:
        import cupy

        self._number, self._cuda = number, cupy.cuda
        with cupy.cuda.Device(number):
            self.memory_bytes = int(cupy.cuda.runtime.memGetInfo()[1])

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that the driver can give."""
        with self._cuda.Device(self._number):
            return int(self._cuda.runtime.memGetInfo()[0])

    def synchronize(self) -> None:
        """Wait for the work of all streams."""
        self._cuda.Device(self._number).synchronize()

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory."""
        root, runtime = empty(nbytes), self._cuda.runtime
        with self._cuda.Device(self._number) as device:
            device.synchronize()  # the copy waits for no kernel on a non-blocking stream
            if nbytes:
                runtime.memcpy(root.ctypes.data, pointer, nbytes, runtime.memcpyDeviceToHost)
        return root

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory."""
        del after
        runtime = self._cuda.runtime
        with self._cuda.Device(self._number) as device:
            device.synchronize()
            runtime.memcpy(pointer, root.ctypes.data, root.nbytes, runtime.memcpyHostToDevice)
            device.synchronize()  # CUDA may return before a copy from ordinary memory is complete
