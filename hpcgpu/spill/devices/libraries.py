"""The library of a device array, by the name of its class: so no library is imported for it.

Here are the adapters for arrays with ``__cuda_array_interface__``, of numba (0.30), RMM (26.10) and others; and for
objects of cuDF (26.10: core/abc.py, core/frame.py, core/buffer and options.py), which cuDF's own serialization moves,
unless they are left to cuDF's own spilling.

Together: the search by class leads to one of these adapters.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import wrapt

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.allocation_failure import with_room
from hpcgpu.spill.devices.device import Kind
from hpcgpu.spill.storage.disk import ImmovableError

# Compiled code may get objects of these libraries, and takes no proxies for them: they come up with their value.
UNPROXIED = frozenset({"torch", "numba", "rmm", "other", "jax"})
LIBRARIES = ("cuda", "cupy", "torch", "numba", "rmm", "other", "jax")  # whose arrays the store finds by address


@functools.lru_cache(256)
def library_of(kind: Any) -> str:  # a class; mypy takes type for what cannot be hashed
    """Return the library of a class of device arrays; "" if its objects hold no device memory.

    "device": the objects have their device in ``__hpcgpu_device__``; "cuda": of cuda.core; "other": they show device
    memory by ``__cuda_array_interface__``, but the store cannot make such objects.
    """
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
    # cudf.core.dataframe, cudf.core.series ...; Buffers and dtypes can be serialized, too, but are no values
    if root == "cudf" and hasattr(kind, "host_serialize") and hasattr(kind, "memory_usage"):
        return "cudf"
    if any(b.__name__ == "Tensor" and b.__module__.partition(".")[0] == "torch" for b in kind.__mro__):
        return "torch"  # subclasses, too: the adapter rejects those that it cannot move
    if kind.__name__ == "DeviceNDArray" and root == "numba":  # numba.cuda.cudadrv.devicearray
        return "numba"
    if kind.__name__ == "DeviceBuffer" and root == "rmm":  # rmm.pylibrmm.device_buffer
        return "rmm"
    if kind.__name__ == "ArrayImpl" and root == "jaxlib":  # jaxlib._jax (0.10.2)
        return "jax"
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

    library: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    offset: int


class BytesView(NamedTuple):
    """The size of a buffer, which shows the whole allocation."""

    library: str
    nbytes: int


def is_cudf(x: Any) -> bool:
    """Tell whether an object is a data frame, series, index or column of cuDF, by its type."""
    kind: type = type(x)
    return library_of(kind) == "cudf"


def spills_itself() -> bool:
    """Tell whether cuDF spills its objects now (``CUDF_SPILL=on``, or user code): then the store must not."""
    cudf = sys.modules.get("cudf")
    return cudf is not None and bool(cudf.get_option("spill"))


def spill_itself(nbytes: int) -> bool:
    """Let cuDF move its buffers down as its own callback of RMM does; return whether it has moved any."""
    if not spills_itself():
        return False
    manager = sys.modules["cudf"].core.buffer.spill_manager.get_global_manager()
    return bool(manager.spill_device_memory(nbytes=nbytes))


class CudfView(NamedTuple):
    """An object of cuDF in packed bytes."""

    kind: type
    header: dict[str, Any]
    frames: tuple[tuple[int, int, bool], ...]  # offset and size of each, and whether it is on the device
    shape: tuple[int, ...] = ()
    library: str = "cudf"


class CudfObjects:
    """cuDF's objects on a device; all allocations of an object are one buffer, and move together.

    Two objects with the same allocations are one buffer. Objects that share only some of their allocations each count
    all of them, and come back apart: cuDF's serialization copies shared memory (buffer.py, make_single_owner_inplace).
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def buffer_of(self, x: Any) -> tuple[int, int]:
        """Return one id for all of an object's allocations, valid while they live, and their bytes."""
        bases = {id(base): int(base.size) for column in _columns(x) for base in _bases(column)}
        return hash(frozenset(bases)) if bases else id(x), sum(bases.values())

    def pack(self, objects: Sequence[Any], empty: Callable[[int], np.ndarray]) -> tuple[np.ndarray, list[CudfView]]:
        """Copy the objects to the host, frame after frame: cuDF's host_serialize would hold all frames twice.

        MemoryError, maybe: of a slice cuDF first makes a copy on the device.
        """
        taken = [(x, *x.device_serialize()) for x in objects]
        root = empty(sum(frame.nbytes for _, _, frames in taken for frame in frames))
        views, end = [], 0
        for x, header, frames in taken:
            spans = []
            for frame, on_device in zip(frames, header["is-cuda"], strict=True):
                begin, end = end, end + frame.nbytes
                if frame.nbytes:
                    self._copy_down(frame, on_device, root[begin:end])
                spans.append((begin, frame.nbytes, bool(on_device)))
            views.append(CudfView(type(x), header, tuple(spans), getattr(x, "shape", ())))
        return root, views

    def unpack(self, root: np.ndarray, views: Sequence[CudfView]) -> list[Any]:
        """Copy packed objects to the device, into memory of RMM."""
        return [v.kind.device_deserialize(v.header, [self._frame(root, *span) for span in v.frames]) for v in views]  # type: ignore[attr-defined]

    def _copy_down(self, frame: Any, on_device: bool, part: np.ndarray) -> None:
        if not on_device:
            part[:] = np.frombuffer(memoryview(frame), np.uint8)
            return
        copy = self._device.copies.to_host(int(frame.ptr), frame.nbytes, lambda _: part)
        if copy is not part:  # a page-locked buffer
            part[:] = copy

    def _frame(self, root: np.ndarray, begin: int, nbytes: int, on_device: bool) -> Any:
        part = root[begin : begin + nbytes]
        if not on_device:  # the object keeps it, while the packed bytes are used again
            return part.copy().data
        memory, pointer, stream = self._device.kind("rmm").allocate(nbytes)
        if nbytes:
            self._device.copies.to_device(part, pointer, stream)
        return memory


def _columns(x: Any) -> Iterator[Any]:
    """Yield the columns of a frame and of its index; a RangeIndex is passed over, since it would make one."""
    index = getattr(x, "_index", None)
    if index is not None:
        yield from _columns(index)
    if type(x).__name__ != "RangeIndex":
        for column in getattr(x, "_columns", (x,)):
            yield getattr(column, "plc_column", column)


def _bases(column: Any) -> Iterator[Any]:
    """Yield the owners of the device memory of a pylibcudf column and of its children."""
    for span in (column.data(), column.null_mask()):
        if span is not None:
            yield getattr(span, "owner", span)  # pylibcudf's own spans are not cuDF's Buffers
    for child in column.children():
        yield from _bases(child)


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
        _, _, shape, strides, _, offset = extent_of(array)
        # the array's own dtype: the interface has no fields of records (numba-cuda 0.30.4)
        return ArrayView("numba", shape, np.dtype(array.dtype), strides, offset)

    def allocate(self, nbytes: int) -> tuple[Any, int, int]:
        """Allocate by CuPy if it is in use, since its pool may have all memory; else by the driver."""
        try:
            return self.device.kind("cupy" if "cupy" in sys.modules else "cuda").allocate(nbytes)
        except SpillError:  # cuda.bindings is not installed
            return self.device.kind("cupy").allocate(nbytes)

    def array_of(self, memory: Any, view: ArrayView) -> Any:
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
        return int(array.ptr), int(array.size)

    def view_of(self, array: Any) -> BytesView:
        return BytesView("rmm", int(array.size))

    def allocate(self, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on RMM's default stream, the legacy one."""
        import rmm

        memory = with_room(self.device, nbytes, lambda: rmm.DeviceBuffer(size=nbytes), self.device.give_back)
        return memory, int(memory.ptr), 0

    def array_of(self, memory: Any, view: BytesView) -> Any:
        return memory


class Immovable(Kind):
    """Objects that show device memory, of classes that the store cannot make: they count, and stay on the device."""

    def extent_of(self, array: Any) -> tuple[int, int]:
        return extent_of(array)[:2]

    def view_of(self, array: Any) -> NoReturn:
        raise ImmovableError(
            array, TypeError("it shows device memory, but hpcgpu cannot make such an object from bytes")
        )


class JaxArrays(Immovable):
    """Arrays of JAX, which alone frees their memory."""

    # __cuda_array_interface__ has no bfloat16 and waits for the array's computation, on an event loop too (0.10.2)
    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return an id, valid while the array lives, and its bytes."""
        return id(array), int(array.nbytes)

    def view_of(self, array: Any) -> NoReturn:
        raise ImmovableError(array, TypeError("JAX keeps its arrays in memory of its own: jax.device_get moves one"))
