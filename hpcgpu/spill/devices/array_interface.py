"""Device arrays that tell by ``__cuda_array_interface__`` where they lie: of numba, of RMM, and of other libraries.

Written after numba-cuda 0.30 and RMM 26.10; nothing here imports these before there are objects of theirs.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.allocation_failure import with_room
from hpcgpu.spill.devices.libraries import extent_of
from hpcgpu.spill.devices.protocols import Gpu, ImmovableError


class ArrayView(NamedTuple):
    """The layout of an array in its memory: strides and offset in bytes.

    Immutable; NumbaArrays makes it, in any thread.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    library: str = "numba"


class BytesView(NamedTuple):
    """A buffer shows the whole allocation. Immutable; RmmBuffers makes it, in any thread."""

    nbytes: int
    library: str = "rmm"


class NumbaArrays:
    """Arrays of numba. An array that came back up is in memory of CuPy's pool, or without CuPy of cuda.core's.

    Each is a buffer of its own, from its first byte to its last: if two show the same memory, both count.

    Thread-safe: it has no state, and gives the calling thread the device's context, since numba's are by thread.
    """

    def __init__(self, device: Gpu) -> None:
        self._device = device

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes; gives the calling thread the device's context.

        numba frees an array in the thread that drops the last reference, and never without a context (numba-cuda
        0.30.4).
        """
        from numba import cuda  # type: ignore[import-not-found] # of no extra of ours

        cuda.current_context()
        return extent_of(array)[:2]

    def view_of(self, array: Any) -> ArrayView:
        """Return the layout of the array there."""
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

    def used_bytes(self, device: Gpu) -> int:
        """Return 0: numba does not count, and arrays that came back up count with the library that allocated."""
        del device
        return 0

    def give_back(self) -> bool:
        """Free the arrays that numba has not freed yet: it frees ten at once, from a queue of its memory manager."""
        from numba import cuda

        queue = cuda.current_context().memory_manager.deallocations
        is_kept = len(queue) > 0
        queue.clear()
        return is_kept


class RmmBuffers:
    """RMM's DeviceBuffers, in memory of its current resource.

    Thread-safe as far as that resource is: RMM's own are.
    """

    def __init__(self, device: Gpu) -> None:
        del device

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

    def used_bytes(self, device: Gpu) -> int:
        """Return 0: only some of RMM's resources count."""
        del device
        return 0

    def give_back(self) -> bool:
        """Return False: RMM's pools keep their memory."""
        return False


class Immovable:
    """Objects that show device memory, of classes that the store cannot make: they count, and stay on the device.

    Thread-safe: it has no state.
    """

    def __init__(self, device: Gpu) -> None:
        del device

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes."""
        return extent_of(array)[:2]

    def view_of(self, array: Any) -> NoReturn:
        """Raise ImmovableError."""
        raise ImmovableError(array, TypeError("it shows device memory, but none can be made from bytes"))

    def allocate(self, device: Gpu, nbytes: int) -> NoReturn:
        """Raise TypeError: no such object has moved down."""
        raise TypeError(device, nbytes)

    def array_of(self, memory: Any, view: Any) -> NoReturn:
        """Raise TypeError, likewise."""
        raise TypeError(memory, view)

    def used_bytes(self, device: Gpu) -> int:
        """Return 0: it is not known."""
        del device
        return 0

    def give_back(self) -> bool:
        """Return False."""
        return False
