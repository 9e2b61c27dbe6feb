"""Values on disk: pickled, with what several of their arrays show written once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.storage.disk import Disk, Stored


class ImmovableError(Exception):
    """A value cannot be pickled, or an array not be copied down; ``kind`` names its type.

    :func:`write`, HostObjects and devices raise it in the thread that copies; Executor takes it for final.
    """

    def __init__(self, value: object, why: Exception) -> None:
        super().__init__(repr(why))
        self.kind = f"{type(value).__module__}.{type(value).__qualname__}"


class Pickled(NamedTuple):
    """A value on disk. Immutable: :func:`write` makes it, a Content holds it, any thread may :func:`read` it.

    Attributes
    ----------
    stored : Stored
        The pickle first, then the arrays' memory.
    places : tuple of (int, int, int)
        Where each array lies: in which of the stored buffers, from which byte to which.

    """

    stored: Stored
    places: tuple[tuple[int, int, int], ...]


def write(disk: Disk, value: Any) -> Pickled:  # noqa: ANN401
    """Pickle a value to disk: all of it or, with OSError, nothing.

    Raises
    ------
    ImmovableError
        It cannot be pickled.

    """
    from hpcgpu.spill.storage.dask_bytes import dumps

    buffers: list[pickle.PickleBuffer] = []
    try:
        data = dumps(value, buffers.append)
        raw = [b.raw() for b in buffers]  # BufferError for what is not contiguous
    except MemoryError:
        raise
    except Exception as e:
        raise ImmovableError(value, e) from e
    frames, places = _each_once(raw)
    return Pickled(disk.write([memoryview(data), *frames]), places)


def read(disk: Disk, pickled: Pickled) -> Any:  # noqa: ANN401
    """Return the value; OSError or SpillError if it cannot be read back."""
    frames = disk.read(pickled.stored)
    return _loads(frames[0], [frames[i][begin:end] for i, begin, end in pickled.places])


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
