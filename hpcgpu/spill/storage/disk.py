"""The disk tier: objects in the segments of a private folder. Values are pickled.

With a file for each object, small objects cost more than their bytes. Compared with zict.File, objects of 16 KiB are
written 11 times and read 2.6 times as fast in segments, objects of 8 MiB 1.2 and 1.5 times (``benchmarks/disk.py``).

Nothing is compressed. The disk of these figures takes 1 to 2 GB/s, with sync. One thread compresses by lz4 (zstd -1)
integers below 1000 at 0.8 (0.4) GB/s and numbers rounded to two digits at 0.7 (0.35); normally distributed numbers and
smooth functions shrink by 0 (8) % at most. Only arrays of nearly all zeros would gain.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.storage import Scratch
from hpcgpu.spill.storage.buffer_pool import Slabs
from hpcgpu.spill.storage.segments import Room, Segments, transfer

# distributed logs a value that cannot be pickled with its whole text, which may be as long as the memory is full
# (pickle.py, 2026.8.0). In the thread that pickles for the store this is left out: the store names the type, once.
_quiet = threading.local()


class ImmovableError(Exception):
    """A value cannot be pickled, or an array cannot be copied down; ``kind`` names its type. It is final."""

    def __init__(self, value: object, why: Exception) -> None:
        super().__init__(repr(why))
        self.kind = f"{type(value).__module__}.{type(value).__qualname__}"


class Stored:
    """Some buffers on disk, one after the other; with the last reference, in any thread, the room goes into the bin."""

    __slots__ = ("_bin", "sizes", "slot")

    def __init__(self, slot: Room, sizes: tuple[int, ...], bin_: deque[Room]) -> None:
        self.slot, self.sizes, self._bin = slot, sizes, bin_  # the room, empty without bytes; the bytes of each buffer

    @property
    def nbytes(self) -> int:
        """The bytes that were written."""
        return sum(self.sizes)

    @property
    def room_bytes(self) -> int:
        """The bytes that it takes on disk."""
        return sum([piece.nbytes for piece in self.slot])

    def __del__(self) -> None:
        # No file is removed here: keys are released on the event loop, and to remove a big file takes milliseconds.
        if self.slot:
            self._bin.append(self.slot)


class Disk:
    """A private folder below ``parent`` (default: TMPDIR), and the objects stored there, by threads that copy."""

    # Only the spill thread shrinks and closes it. It takes contiguous views of bytes, and returns arrays of shape
    # (nbytes,) and dtype uint8, not page-locked. ConfigError if others can change a folder above ``parent``, unless
    # ``trusted``. A limit of 0 means no limit but the disk's.

    def __init__(
        self, parent: str | None, slabs: Slabs | None = None, limit_bytes: int = 0, *, trusted: bool = False
    ) -> None:
        self._scratch = Scratch.make(parent, "spill", trusted=trusted)
        self.folder = self._scratch.path
        self.segments = Segments(self.folder, most_bytes=limit_bytes)
        self.slabs = slabs or Slabs(0)
        self.waste: deque[Room] = deque()

    def write(self, buffers: Sequence[memoryview]) -> Stored:
        """Write the buffers: all of them or, with OSError, none."""
        self.empty_bin()
        sizes = tuple(b.nbytes for b in buffers)
        slot = self.segments.take(sum(sizes))
        try:
            transfer(slot, [b.cast("B") for b in buffers if b.nbytes], os.pwritev)
        except BaseException:
            self.segments.give_back([slot])
            raise
        return Stored(slot, sizes, self.waste)

    def empty(self, nbytes: int) -> np.ndarray:
        """Return host memory for a buffer."""
        # np.empty and preadv release the GIL; bytearray(n) holds it while it clears the memory
        return self.slabs.empty(nbytes)

    def empty_bin(self) -> None:
        """Make the room in the bin usable again, or remove its files."""
        if self.waste:
            self.segments.give_back(self._take_waste())

    @property
    def has_excess(self) -> bool:
        """True if more room on disk, or more memory, is free than the store keeps."""
        return self.segments.has_excess or self.slabs.has_excess

    def shrink(self) -> None:
        """Give back some of the excess; call it again while :attr:`has_excess`."""
        self.segments.trim()
        self.slabs.shrink()

    def read(self, stored: Stored) -> list[np.ndarray]:
        """Return the buffers; OSError if any of them is missing."""
        out = [self.empty(size) for size in stored.sizes]
        transfer(stored.slot, [o.data for o in out if o.nbytes], os.preadv)
        return out

    def close(self) -> None:
        """Remove the folder; called once."""
        self.segments.close()
        self._scratch.remove()

    def _take_waste(self) -> Iterator[Room]:
        while self.waste:
            try:
                yield self.waste.popleft()
            except IndexError:  # emptied by another thread
                return


class Pickled(NamedTuple):
    """A value on disk. Immutable; any thread may read it."""

    stored: Stored  # the pickle first, then the arrays' memory
    spans: tuple[tuple[int, int, int], ...]  # of each array: the number of the stored buffer, its first byte and end

    @staticmethod
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

    def read(self, disk: Disk) -> Any:
        """Return the value; OSError or SpillError if it cannot be read back."""
        frames = disk.read(self.stored)
        try:
            return pickle.loads(frames[0].data, buffers=[frames[i][begin:end] for i, begin, end in self.spans])
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
