"""CuPy's arrays, and copies by CuPy. cuDF's objects: moved by cuDF's own serialization, or left to its own spilling.

Nothing here imports cuDF.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices import Gpu, Kind, PlainCopies
from hpcgpu.spill.devices.allocation_failure import attached_gpu, with_room

# Written after cuDF 26.10: core/abc.py, core/frame.py, core/buffer and options.py.


def is_cudf(x: Any) -> bool:
    """Tell whether an object is a data frame, series, index or column of cuDF, by its type."""
    kind: type = type(x)
    return is_cudf_type(kind)


def spills_itself() -> bool:
    """Tell whether cuDF spills its objects (``enable_cudf_spill``, ``CUDF_SPILL=on``): then the store must not."""
    # each time: user code may switch it
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

    def __init__(self, device: Gpu) -> None:
        self._device = device

    def buffer_of(self, x: Any) -> tuple[int, int]:
        """Return one id for all of an object's allocations, valid while they live, and their bytes."""
        bases = {id(base): int(base.size) for column in _columns(x) for base in _bases(column)}
        return hash(frozenset(bases)) if bases else id(x), sum(bases.values())

    def pack(self, objects: Sequence[Any], empty: Callable[[int], np.ndarray]) -> tuple[np.ndarray, list[CudfView]]:
        """Copy the objects to the host, frame after frame: cuDF's host_serialize would hold all frames twice."""
        # of a slice cuDF first makes a copy on the device, for which there may be no memory
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
            return memoryview(part.copy())  # type: ignore[arg-type]
        memory, pointer, stream = self._device.kind("rmm").allocate(self._device, nbytes)
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


@functools.lru_cache(256)
def is_cudf_type(kind: type) -> bool:
    """Tell whether a type is that of a data frame, series, index or column of cuDF."""
    # cudf.core.dataframe, cudf.core.series ...; Buffers and dtypes can be serialized, too, but are no values
    root = kind.__module__.partition(".")[0]
    return root == "cudf" and hasattr(kind, "host_serialize") and hasattr(kind, "memory_usage")


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
