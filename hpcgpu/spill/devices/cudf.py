"""cuDF's objects: moved by cuDF's own serialization, or left to cuDF's own spilling. Nothing here imports cuDF."""
# Written after cuDF 26.10: core/abc.py, core/frame.py, core/buffer and options.py.

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices import Gpu


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
