"""Columns of data frames on disk: one is read without the others, and what is asked about a frame without any.

A frame goes down whole and, for all that is not told here, comes up whole: pandas keeps columns of a kind in one block,
so that as units of their own they would have to be copied apart, or come back as a frame of other blocks. But its
pickle leaves the memory of the blocks aside, and a column of a block is one piece of it.
"""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill import pickled
from hpcgpu.spill.disk import Disk
from hpcgpu.spill.owners import ARRAYS

UNTOLD = object()
# Of a smaller one a column is read no sooner than all: of 64 KiB 0.5 and 0.1 ms, of 32 MB 3 and 8.
LEAST_BYTES = 1 << 20
_FACTS = frozenset({"axes", "columns", "dtypes", "empty", "index", "keys", "ndim", "shape", "size"})


class _Frames(NamedTuple):
    """What is pickled of objects of which some are data frames.

    ``first`` is all of the frames but their columns, so that what they share with columns (an index that is one,
    categories) is not taken for a column: its buffers come before the ``mark``.
    """

    first: list[Any]
    mark: pickle.PickleBuffer
    objects: list[Any]


def write(disk: Disk, objects: list[Any]) -> pickled.Pickled:
    """Pickle objects to disk, so that :class:`Outline` can read columns of them; raises as :func:`pickled.write`."""
    kinds: list[type] = [type(x) for x in objects]
    frames = [x for x, kind in zip(objects, kinds, strict=True) if is_frame(kind)]
    if not frames:
        return pickled.write(disk, objects)
    # blocks are not public, see owners.py
    first = [(f.axes, [block.dtype for block in f._mgr.blocks], f.attrs) for f in frames]
    columns = {begin for f in frames for block in f._mgr.blocks for begin, _ in _spans(block.values) or ()}
    mark = bytearray(1)

    def late(buffers: Sequence[memoryview]) -> frozenset[int]:
        begins = [_span(np.asarray(b))[0] for b in buffers]
        after = next(i for i, b in enumerate(buffers) if b.obj is mark)
        # of a column of Arrow's a copy is pickled (pandas 3.1.1, ArrowExtensionArray.__getstate__)
        arrow = (type(b.obj).__module__.startswith("pyarrow") for b in buffers)
        found = (begin in columns or is_arrow for begin, is_arrow in zip(begins, arrow, strict=True))
        return frozenset(i for i, is_column in enumerate(found) if i > after and is_column)

    return pickled.write(disk, _Frames(first, pickle.PickleBuffer(mark), objects), late)


def read(disk: Disk, stored: pickled.Pickled) -> list[Any]:
    """Return the objects; raises as :func:`pickled.read`."""
    found = pickled.read(disk, stored)
    return found.objects if type(found) is _Frames else found


@functools.lru_cache(256)
def is_frame(kind: type) -> bool:
    """Tell the class of pandas' data frames."""
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def is_about_columns(kind: type, operation: Callable[..., Any], *args: Any) -> bool:  # noqa: ANN401
    """Tell an operation on a data frame to which :meth:`Outline.answer` may know the answer."""
    if operation is getattr:
        return args[0] in _FACTS or not hasattr(kind, args[0])
    return operation in (len, iter, operator.contains, operator.getitem)


class Outline:
    """A data frame that lies on disk, without its columns.

    Parameters
    ----------
    disk : Disk
        Where it lies.
    stored : Pickled
        What :func:`write` returned.
    index : int
        Which of the objects it is.

    """

    def __init__(self, disk: Disk, stored: pickled.Pickled, index: int) -> None:
        self._early = pickled.Early(disk, stored)
        # columns are zeros, which take no memory until they are read
        self._frame = self._early.value.objects[index]

    @property
    def read_bytes(self) -> int:
        """How much was read so far."""
        return self._early.read_bytes

    def answer(self, operation: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        """Return what the operation on the frame returns, or UNTOLD, if it needs more of it than columns by name."""
        if operation is operator.getitem:
            return self._columns(args[0])
        if operation is getattr and args[0] not in _FACTS:
            return self._columns(args[0])
        return operation(self._frame, *args)

    def _columns(self, key: Any) -> Any:  # noqa: ANN401
        names = self._frame.columns
        labels = key if type(key) is list else [key]
        if not all(_is_label(x, names) for x in labels):
            return UNTOLD
        # names may come several times, and in levels: pandas knows which columns they mean
        positions = type(self._frame)(np.arange(len(names))[None], columns=names)[key].to_numpy().ravel()
        for position in dict.fromkeys(positions):
            spans = _spans(self._frame.iloc[:, position].array)
            if spans is None:
                return UNTOLD
            for begin, end in spans:
                self._early.fill(begin, end)
        return self._frame[key].copy()  # the zeros of the others would be held with it


def _is_label(x: Any, names: Any) -> bool:  # noqa: ANN401
    """Tell the name of a column from what is about rows: truths, slices, functions, arrays."""
    if isinstance(x, (bool, np.bool_, slice)) or callable(x):
        return False
    try:
        return x in names
    except TypeError:  # unhashable
        return False


def _spans(values: Any) -> list[tuple[int, int]] | None:  # noqa: ANN401
    """Return where the memory of a column or block begins and ends; None for a kind that refers to more."""
    if (chunks := getattr(values, "_pa_array", None)) is not None:
        return [(b.address, b.address + b.size) for chunk in chunks.chunks for b in chunk.buffers() if b is not None]
    arrays = [values] if type(values) is np.ndarray else [getattr(values, name, None) for name in ARRAYS]
    found = [x for x in arrays if type(x) is np.ndarray]
    return list(map(_span, found)) if found and not any(x.dtype.hasobject for x in found) else None


def _span(array: np.ndarray) -> tuple[int, int]:
    begin = array.__array_interface__["data"][0]
    last = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    return begin, begin + (last + array.itemsize if array.size else 0)
