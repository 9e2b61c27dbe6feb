"""Values on disk: pickled; bytes that several arrays share are written once."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices import ImmovableError
from hpcgpu.spill.storage.disk import Disk, Stored

# distributed logs a value that cannot be pickled with its whole text, which may be as long as the memory is full
# (pickle.py, 2026.8.0). In the thread that pickles for the store this is left out: the store names the type, once.
_quiet = threading.local()


class Pickled(NamedTuple):
    """A value on disk. Immutable: :func:`write` makes it, a Content holds it, any thread may :func:`read` it."""

    stored: Stored  # the pickle first, then the arrays' memory
    spans: tuple[tuple[int, int, int], ...]  # of each array: the number of the stored buffer, its first byte and end


def write(disk: Disk, value: Any) -> Pickled:
    """Pickle a value to disk: all of it or, with OSError, nothing."""
    try:
        data, buffers = _dumps(value)
        raw = [b.raw() for b in buffers]  # BufferError if one is not contiguous
    except MemoryError:
        raise
    except Exception as e:
        raise ImmovableError(value, e) from e
    frames, spans = _each_once(raw)
    return Pickled(disk.write([memoryview(data), *frames]), spans)


def read(disk: Disk, pickled: Pickled) -> Any:
    """Return the value; OSError or SpillError if it cannot be read back."""
    frames = disk.read(pickled.stored)
    try:
        return pickle.loads(frames[0].data, buffers=[frames[i][begin:end] for i, begin, end in pickled.spans])
    except MemoryError:
        raise
    except Exception as e:  # of a user's class
        raise SpillError(f"it cannot be unpickled: {e!r}") from e


def _each_once(buffers: Sequence[memoryview]) -> tuple[list[memoryview], tuple[tuple[int, int, int], ...]]:
    """Return the buffers that lie inside no other buffer, and the span of each buffer in them."""
    if len(buffers) == 1:
        return list(buffers), ((1, 0, buffers[0].nbytes),)
    extents = []
    for i, buffer in enumerate(buffers):
        begin = np.asarray(buffer).__array_interface__["data"][0]
        extents.append((begin, -(begin + buffer.nbytes), i))
    frames: list[memoryview] = []
    spans: dict[int, tuple[int, int, int]] = {}
    first = last = 0
    for begin, end, i in sorted(extents):
        if not frames or -end > last:
            frames.append(buffers[i])
            first, last = begin, -end
        spans[i] = (len(frames), begin - first, -end - first)
    return frames, tuple(spans[i] for i in range(len(buffers)))


def _is_for_others(_: logging.LogRecord) -> bool:
    return not getattr(_quiet, "here", False)


def _dumps(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value; if that fails, use distributed's pickle, which can pickle classes of a client's script."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        return pickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers
    except Exception:  # of a user's __reduce__; distributed's pickle catches all, too
        from distributed.protocol import pickle as by_value

        buffers.clear()
        _quiet.here = True
        by_value.logger.addFilter(_is_for_others)
        try:
            return by_value.dumps(value, buffer_callback=buffers.append), buffers
        finally:
            _quiet.here = False
