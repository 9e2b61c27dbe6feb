"""The disk tier: objects in the segments of a private folder.

With a file for each object, small objects cost more than their bytes. Compared with zict.File, objects of 16 KiB are
written 11 times and read 2.6 times as fast in segments, objects of 8 MiB 1.2 and 1.5 times (``benchmarks/disk.py``).

Nothing is compressed. The disk of these figures takes 1 to 2 GB/s, with sync. One thread compresses by lz4 (zstd -1)
integers below 1000 at 0.8 (0.4) GB/s and numbers rounded to two digits at 0.7 (0.35); normally distributed numbers and
smooth functions shrink by 0 (8) % at most. Only arrays of nearly all zeros would gain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from hpcgpu.spill.storage import Scratch, segment
from hpcgpu.spill.storage.buffer_pool import Slabs
from hpcgpu.spill.storage.segment import Room
from hpcgpu.spill.storage.segments import Segments


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
        self._segments = Segments(self.folder, most_bytes=limit_bytes)
        self._slabs = slabs or Slabs(0)
        self.waste: deque[Room] = deque()

    def write(self, buffers: Sequence[memoryview]) -> Stored:
        """Write the buffers: all of them or, with OSError, none."""
        self.empty_bin()
        sizes = tuple(b.nbytes for b in buffers)
        slot = self._segments.take(sum(sizes))
        try:
            segment.write(slot, [b.cast("B") for b in buffers if b.nbytes])
        except BaseException:
            self._segments.give_back([slot])
            raise
        return Stored(slot, sizes, self.waste)

    def empty(self, nbytes: int) -> np.ndarray:
        """Return host memory for a buffer."""
        # np.empty and preadv release the GIL; bytearray(n) holds it while it clears the memory
        return self._slabs.empty(nbytes)

    @property
    def limit_bytes(self) -> int:
        """The most that the files may take; 0: no limit but the disk's."""
        return self._segments.limit_bytes

    @property
    def idle_bytes(self) -> int:
        """Host memory that is kept for the next buffers."""
        return self._slabs.free_bytes

    def trim(self) -> int:
        """Give this memory back to the system; return its bytes."""
        return self._slabs.trim()

    def empty_bin(self) -> None:
        """Make the room in the bin usable again, or remove its files."""
        if self.waste:
            self._segments.give_back(self._take_waste())

    @property
    def has_excess(self) -> bool:
        """True if more room on disk, or more memory, is free than the store keeps."""
        return self._segments.has_excess or self._slabs.has_excess

    def shrink(self) -> None:
        """Give back some of the excess; call it again while :attr:`has_excess`."""
        self._segments.trim()
        self._slabs.shrink()

    def read(self, stored: Stored) -> list[np.ndarray]:
        """Return the buffers; OSError if any of them is missing."""
        out = [self.empty(size) for size in stored.sizes]
        segment.read(stored.slot, [o.data for o in out if o.nbytes])
        return out

    def close(self) -> None:
        """Remove the folder; called once."""
        self._segments.close()
        self._scratch.remove()

    def _take_waste(self) -> Iterator[Room]:
        while self.waste:
            try:
                yield self.waste.popleft()
            except IndexError:  # emptied by another thread
                return
