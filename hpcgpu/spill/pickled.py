"""Values on disk: pickled, with what several of their arrays show written once."""

from __future__ import annotations

import itertools
import mmap
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.disk import Disk, Stored

_ALIGNED = 64  # as Arrow has its buffers


class ImmovableError(Exception):
    """A value cannot be pickled; ``kind`` names its type."""

    def __init__(self, value: object, why: Exception) -> None:
        super().__init__(repr(why))
        self.kind = f"{type(value).__module__}.{type(value).__qualname__}"


class Pickled(NamedTuple):
    """A value on disk.

    Attributes
    ----------
    stored : Stored
        The pickle, and the arrays' memory.
    places : tuple of (int, int, int)
        Where each array lies: in which of the stored buffers, from which byte to which.
    late : frozenset of int
        The arrays without which the value can be unpickled, to be read later (:class:`Early`).

    """

    stored: Stored
    places: tuple[tuple[int, int, int], ...]
    late: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """What was written."""
        return sum(self.stored.sizes)

    @property
    def early_bytes(self) -> int:
        """What must be read to unpickle the value without its late arrays."""
        early = (end - begin for i, (_, begin, end) in enumerate(self.places) if i not in self.late)
        return self.stored.sizes[0] + sum(early)


_Late = Callable[[Sequence[memoryview]], frozenset[int]]


def write(disk: Disk, value: Any, late: _Late | None = None) -> Pickled:  # noqa: ANN401
    """Pickle a value to disk: all of it or, with OSError, nothing.

    ``late`` is given the memory of the value's arrays, and tells which of them may be read later.

    Raises
    ------
    ImmovableError
        It cannot be pickled.

    """
    from hpcgpu.spill.dask import dumps

    buffers: list[pickle.PickleBuffer] = []
    try:
        data = dumps(value, buffers.append)
        raw = [b.raw() for b in buffers]  # BufferError for what is not contiguous
    except MemoryError:
        raise
    except Exception as e:
        raise ImmovableError(value, e) from e
    frames, places = _each_once(raw)
    return Pickled(disk.write([memoryview(data), *frames]), places, late(raw) if late else frozenset())


def read(disk: Disk, pickled: Pickled) -> Any:  # noqa: ANN401
    """Return the value; OSError or SpillError if it cannot be read back."""
    frames = disk.read(pickled.stored)
    return _loads(frames[0], [frames[i][begin:end] for i, begin, end in pickled.places])


class Early:
    """A value on disk that is unpickled before its late arrays are read; raises as :func:`read`.

    Attributes
    ----------
    value : object
        The value, with zeros in place of what was not read.
    read_bytes : int
        How much was read.

    """

    def __init__(self, disk: Disk, pickled: Pickled) -> None:
        self._disk, self._pickled, self.read_bytes = disk, pickled, 0
        sizes = [end - begin for _, begin, end in pickled.places]
        zeros = _zeros([size for i, size in enumerate(sizes) if i in pickled.late])
        self._arrays = [next(zeros) if i in pickled.late else np.empty(size, np.uint8) for i, size in enumerate(sizes)]
        self._begins = [array.__array_interface__["data"][0] for array in self._arrays]
        data = np.empty(pickled.stored.sizes[0], np.uint8)
        self._read(0, 0, data)
        for (frame, begin, _), array, i in zip(pickled.places, self._arrays, itertools.count(), strict=False):
            if i not in pickled.late:
                self._read(frame, begin, array)
        self.value = _loads(data, self._arrays)

    def fill(self, begin: int, end: int) -> None:
        """Read what belongs to these addresses in memory, if that is in a late array."""
        for i in self._pickled.late:
            first, array = begin - self._begins[i], self._arrays[i]
            if 0 <= first < array.nbytes:
                frame, offset, _ = self._pickled.places[i]
                self._read(frame, offset + first, array[first : first + end - begin])

    def _read(self, frame: int, begin: int, into: np.ndarray) -> None:
        self._disk.read_part(self._pickled.stored, frame, begin, into)
        self.read_bytes += into.nbytes


def _zeros(sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Return arrays of zeros, of which no page is in memory until it is written to.

    np.zeros clears memory that it had before: 6 ms for 34 MB, more than all else here.
    """
    starts = list(itertools.accumulate((size + -size % _ALIGNED for size in sizes), initial=0))
    try:
        room = mmap.mmap(-1, starts[-1] or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:  # it has nothing to do with the disk
        raise MemoryError(f"no room for {starts[-1]} bytes: {e}") from e
    return (np.frombuffer(room, np.uint8, size, start) for start, size in zip(starts, sizes, strict=False))


def _loads(data: np.ndarray, buffers: Sequence[np.ndarray]) -> Any:  # noqa: ANN401
    try:
        return pickle.loads(data.data, buffers=buffers)
    except MemoryError:
        raise
    except Exception as e:  # whatever a user's class raises
        raise SpillError(f"it cannot be unpickled: {e!r}") from e


def _each_once(buffers: Sequence[memoryview]) -> tuple[list[memoryview], tuple[tuple[int, int, int], ...]]:
    """Return the buffers without those that lie inside another one, and where each of them is found."""
    if len(buffers) == 1:
        return list(buffers), ((1, 0, buffers[0].nbytes),)
    spans = []
    for i, buffer in enumerate(buffers):
        begin = np.asarray(buffer).__array_interface__["data"][0]
        spans.append((begin, -(begin + buffer.nbytes), i))
    frames: list[memoryview] = []
    places: dict[int, tuple[int, int, int]] = {}
    first = last = 0
    for begin, end, i in sorted(spans):
        if not frames or -end > last:
            frames.append(buffers[i])
            first, last = begin, -end
        places[i] = (len(frames), begin - first, -end - first)
    return frames, tuple(places[i] for i in range(len(buffers)))
