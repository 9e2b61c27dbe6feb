"""The library of a device array, by the name of its class: so no library is imported for it.

Arrays with ``__cuda_array_interface__`` are of numba (0.30), RMM (26.10) and others, which are imported late.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple, NoReturn

import numpy as np
import wrapt

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices import Gpu, ImmovableError, Kind
from hpcgpu.spill.devices.allocation_failure import with_room
from hpcgpu.spill.devices.rapids import is_cudf_type

# Compiled code may get objects of these libraries, and takes no proxies for them.
UNPROXIED = frozenset({"torch", "numba", "rmm", "other"})
LIBRARIES = ("cuda", "cupy", "torch", "numba", "rmm", "other")  # whose arrays the store finds by address


@functools.lru_cache(256)
def library_of(kind: Any) -> str:  # a class; mypy takes type for what cannot be hashed
    """Return the library of a class of device arrays; "" if its objects hold no device memory."""
    # "device": the objects have their device in __hpcgpu_device__; "cuda": of cuda.core; "other": they show device
    # memory by __cuda_array_interface__, but the store cannot make such objects
    if issubclass(kind, wrapt.BaseObjectProxy):
        return ""  # access would bring its object up
    if hasattr(kind, "__hpcgpu_device__"):
        return "device"
    root = kind.__module__.partition(".")[0]
    if kind.__name__ == "ndarray" and root == "cupy":  # "cupy", "cupy._core.core"
        return "cupy"
    # cuda-core 1.2.2 says "cuda.core._memory._buffer", versions before 1.0 "cuda.core.experimental._memory..."
    if kind.__name__ == "Buffer" and kind.__module__.startswith("cuda.core."):
        return "cuda"
    if is_cudf_type(kind):
        return "cudf"
    if any(b.__name__ == "Tensor" and b.__module__.partition(".")[0] == "torch" for b in kind.__mro__):
        return "torch"  # subclasses, too: the adapter rejects those that it cannot move
    if kind.__name__ == "DeviceNDArray" and root == "numba":  # numba.cuda.cudadrv.devicearray
        return "numba"
    if kind.__name__ == "DeviceBuffer" and root == "rmm":  # rmm.pylibrmm.device_buffer
        return "rmm"
    # numba's mapped and managed arrays are NumPy arrays, too: the host can read them in their memory
    return "other" if hasattr(kind, "__cuda_array_interface__") and not issubclass(kind, np.ndarray) else ""


class Extent(NamedTuple):
    """The memory of an array, by its ``__cuda_array_interface__``."""

    pointer: int  # the first byte
    nbytes: int  # from the first byte to the last one
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: np.dtype[Any]
    offset: int  # of the element with all indices 0, in bytes from ``pointer``; not 0 if a stride is negative


def extent_of(x: Any) -> Extent:
    """Return the memory of an array (CUDA Array Interface, versions 0 to 3)."""
    interface = x.__cuda_array_interface__
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    dtype = np.dtype(interface["descr"] if typestr[1] == "V" and interface.get("descr") else typestr)
    strides = interface.get("strides")
    if strides is None:
        strides = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    strides = tuple(int(s) for s in strides)
    begin = int(interface["data"][0] or 0)
    if 0 in shape or not begin:
        return Extent(begin, 0, shape, strides, dtype, 0)
    spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    before = -sum(s for s in spans if s < 0)
    nbytes = before + sum(s for s in spans if s > 0) + dtype.itemsize
    return Extent(begin - before, nbytes, shape, strides, dtype, before)


def is_on_device(x: Any) -> bool:
    """Tell whether an object that may show device memory shows some now: torch's objects in host memory do not."""
    try:
        return extent_of(x).nbytes > 0
    except Exception:  # each library has its own: AttributeError, TypeError, RuntimeError
        return False


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
