"""Device arrays that say by ``__cuda_array_interface__`` where they lie: of numba, of RMM, and of who knows whom.

Read from numba-cuda 0.30 and RMM 26.10; nothing here imports them before there are objects of theirs.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.libraries import extent_of
from hpcgpu.spill.devices.pressure import with_room
from hpcgpu.spill.devices.protocols import Gpu
from hpcgpu.spill.storage.pickled import ImmovableError


class ArrayView(NamedTuple):
    """How an array lies in its memory: strides and offset in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    library: str = "numba"


class BytesView(NamedTuple):
    """A buffer is its allocation as a whole."""

    nbytes: int
    library: str = "rmm"


class NumbaArrays:
    """Arrays of numba; those that have come up again are in memory of CuPy's pool, or of cuda.core's without CuPy.

    Each is memory of its own, from its first byte to its last: of two that show the same, each counts.

    Thread-safe: it keeps nothing, and makes the device's context the thread's, since numba's are by thread.
    """

    def __init__(self, device: Gpu) -> None:
        self._device = device

    def extent_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and bytes; from then on the calling thread has the device's context.

        numba frees an array in the thread that lets go of it last, and without a context never (numba-cuda 0.30.4).
        """
        from numba import cuda  # type: ignore[import-not-found] # of no extra of ours

        cuda.current_context()
        return extent_of(array)[:2]

    def view_of(self, array: Any) -> ArrayView:  # noqa: ANN401
        """Return how the array lies there."""
        # its own dtype: numba shows no fields of records (numba-cuda 0.30.4)
        return ArrayView(*extent_of(array)[2:])._replace(dtype=np.dtype(array.dtype))

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Allocate by CuPy where it is in use, since it may have a pool of all memory; else by the driver."""
        try:
            return device.kind("cupy" if "cupy" in sys.modules else "cuda").allocate(device, nbytes)
        except SpillError:  # neither is cuda.bindings there
            return device.kind("cupy").allocate(device, nbytes)

    def array_of(self, memory: Any, view: ArrayView) -> Any:  # noqa: ANN401
        """Return an array in memory that was allocated, which it keeps alive."""
        from numba import cuda

        pointer = int(getattr(memory, "pointer", 0) or getattr(memory, "ptr", 0)) + view.offset
        # a record's fields are not in a typestr: numba gives what it finds there to numpy.dtype
        shown = {"shape": view.shape, "strides": view.strides, "typestr": view.dtype, "data": (pointer, False)}
        return cuda.from_cuda_array_interface({**shown, "version": 3}, owner=memory)

    def used_bytes(self, device: Gpu) -> int:
        """Return 0: numba keeps no books, and what came up again counts with whose memory it is."""
        del device
        return 0

    def give_back(self) -> None:
        """Free what numba has put off: it frees ten arrays at once."""
        from numba import cuda

        cuda.current_context().deallocations.clear()


class RmmBuffers:
    """RMM's DeviceBuffers, in memory of its current resource.

    Thread-safe as far as that resource is: RMM's own are.
    """

    def __init__(self, device: Gpu) -> None:
        del device

    def extent_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and bytes."""
        return int(array.ptr), int(array.size)

    def view_of(self, array: Any) -> BytesView:  # noqa: ANN401
        """Return how many bytes it has."""
        return BytesView(int(array.size))

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on the stream that RMM takes by default, the legacy one."""
        import rmm

        memory = with_room(device, nbytes, lambda: rmm.DeviceBuffer(size=nbytes), device.give_back)
        return memory, int(memory.ptr), 0

    def array_of(self, memory: Any, view: BytesView) -> Any:  # noqa: ANN401
        """Return the memory itself."""
        del view
        return memory

    def used_bytes(self, device: Gpu) -> int:
        """Return 0: of all resources only those that count know it."""
        del device
        return 0

    def give_back(self) -> None:
        """Do nothing: what RMM's pools keep, they keep."""


class Immovable:
    """What shows device memory, of a class that nobody knows how to make: it counts, and stays where it is.

    Thread-safe: it keeps nothing.
    """

    def __init__(self, device: Gpu) -> None:
        del device

    def extent_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and bytes."""
        return extent_of(array)[:2]

    def view_of(self, array: Any) -> NoReturn:  # noqa: ANN401
        """Raise ImmovableError."""
        raise ImmovableError(array, TypeError("it shows device memory, but none can be made from bytes"))

    def allocate(self, device: Gpu, nbytes: int) -> NoReturn:
        """Raise TypeError: nothing of it came down."""
        raise TypeError(device, nbytes)

    def array_of(self, memory: Any, view: Any) -> NoReturn:  # noqa: ANN401
        """Raise TypeError, likewise."""
        raise TypeError(memory, view)

    def used_bytes(self, device: Gpu) -> int:
        """Return 0: nobody tells."""
        del device
        return 0

    def give_back(self) -> None:
        """Do nothing."""
