"""Device arrays with ``__cuda_array_interface__``: of numba (0.30), RMM (26.10) and others, which are imported late."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.allocation_failure import with_room
from hpcgpu.spill.devices.libraries import extent_of
from hpcgpu.spill.devices.protocols import Gpu, ImmovableError, Kind


class ArrayView(NamedTuple):
    """The layout of an array in its memory; strides and offset in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    library: str = "numba"


class BytesView(NamedTuple):
    """The size of a buffer, which shows the whole allocation."""

    nbytes: int
    library: str = "rmm"


class NumbaArrays(Kind):
    """Arrays of numba, each a buffer of its own. One that came back up is in memory of CuPy or cuda.core."""

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes; two arrays that show the same memory both count."""
        from numba import cuda  # type: ignore[import-not-found] # of no extra of ours

        # numba frees an array in the thread that drops the last reference, and never without a context, which is by
        # thread (numba-cuda 0.30.4)
        cuda.current_context()
        return extent_of(array)[:2]

    def view_of(self, array: Any) -> ArrayView:
        """Return the layout of the array in its memory."""
        # the array's own dtype: the interface has no fields of records (numba-cuda 0.30.4)
        return ArrayView(*extent_of(array)[2:])._replace(dtype=np.dtype(array.dtype))

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Allocate by CuPy if it is in use, since its pool may have all memory; else by the driver."""
        try:
            return device.kind("cupy" if "cupy" in sys.modules else "cuda").allocate(device, nbytes)
        except SpillError:  # cuda.bindings is not installed
            return device.kind("cupy").allocate(device, nbytes)

    def array_of(self, memory: Any, view: ArrayView) -> Any:
        """Return an array in allocated memory, which it keeps alive."""
        from numba import cuda

        pointer = int(getattr(memory, "pointer", 0) or getattr(memory, "ptr", 0)) + view.offset
        # a typestr has no fields of a record: numba gives any object here to numpy.dtype
        shown = {"shape": view.shape, "strides": view.strides, "typestr": view.dtype, "data": (pointer, False)}
        return cuda.from_cuda_array_interface({**shown, "version": 3}, owner=memory)

    def give_back(self) -> bool:
        """Free the arrays in numba's queue, from which it frees ten at once; return whether there were any."""
        from numba import cuda

        queue = cuda.current_context().memory_manager.deallocations
        is_kept = len(queue) > 0
        queue.clear()
        return is_kept


class RmmBuffers(Kind):
    """RMM's DeviceBuffers, in memory of its current resource."""

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes."""
        return int(array.ptr), int(array.size)

    def view_of(self, array: Any) -> BytesView:
        """Return its size."""
        return BytesView(int(array.size))

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on RMM's default stream, the legacy one."""
        import rmm

        memory = with_room(device, nbytes, lambda: rmm.DeviceBuffer(size=nbytes), device.give_back)
        return memory, int(memory.ptr), 0

    def array_of(self, memory: Any, view: BytesView) -> Any:
        """Return the memory itself."""
        del view
        return memory


class Immovable(Kind):
    """Objects that show device memory, of classes that the store cannot make: they count, and stay on the device."""

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes."""
        return extent_of(array)[:2]

    def view_of(self, array: Any) -> NoReturn:
        """Raise ImmovableError."""
        raise ImmovableError(
            array, TypeError("it shows device memory, but hpcgpu cannot make such an object from bytes")
        )
