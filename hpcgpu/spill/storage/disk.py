"""The disk tier: objects in the segments of a private folder.

A file for each object costs more than its bytes where objects are small: of 16 KiB, segments are written 11 times and
read 2.6 times as fast, of 8 MiB 1.2 and 1.5 times (``benchmarks/disk.py``, beside zict.File).

Nothing is compressed. This disk takes 1 to 2 GB/s when its sync is waited for. One thread compresses by lz4 (zstd -1)
integers below 1000 at 0.8 (0.4) GB/s and numbers rounded to two digits at 0.7 (0.35); normally distributed numbers and
smooth functions shrink by 0 (8) % at most. Only what is nearly all zeros would gain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from hpcgpu.spill.storage import segment
from hpcgpu.spill.storage.scratch import Scratch
from hpcgpu.spill.storage.segment import Slot
from hpcgpu.spill.storage.segments import Segments
from hpcgpu.spill.storage.slabs import Slabs


class Stored:
    """Some buffers on disk, one after the other; in the bin when nothing refers to it any more.

    Immutable. Disk makes it, a Content or a Pickled holds it. Any thread may let it go: no lock is taken for the bin.

    Attributes
    ----------
    slot : Slot
        Where they lie; empty if they have no bytes.
    sizes : tuple of int
        Bytes of each buffer.

    """

    __slots__ = ("_bin", "sizes", "slot")

    def __init__(self, slot: Slot, sizes: tuple[int, ...], bin_: deque[Slot]) -> None:
        self.slot, self.sizes, self._bin = slot, sizes, bin_

    @property
    def nbytes(self) -> int:
        """What was written."""
        return sum(self.sizes)

    @property
    def room_bytes(self) -> int:
        """What it takes on disk."""
        return sum([piece.nbytes for piece in self.slot])

    def __del__(self) -> None:
        # not removed here: keys are released on the event loop, and a big file takes milliseconds
        if self.slot:
            self._bin.append(self.slot)


class Disk:
    """A private folder below ``parent`` (default: TMPDIR), and what is stored there.

    Thread-safe; GpuSpillBuffer makes it. Threads that copy call it without the store's lock; the spill thread alone
    shrinks and closes it. It takes contiguous views of bytes, and returns arrays of shape (nbytes,) and dtype uint8,
    not page-locked.

    Parameters
    ----------
    parent : str or None
        Where to make the folder.
    slabs : Slabs, optional
        Where the buffers that are read back get their memory.
    limit_bytes : int
        The most that the files may take; 0: what the disk has.
    trusted : bool
        Take ``parent`` also where others can change a folder above it.

    """

    def __init__(
        self, parent: str | None, slabs: Slabs | None = None, limit_bytes: int = 0, *, trusted: bool = False
    ) -> None:
        self._scratch = Scratch.make(parent, "spill", trusted=trusted)
        self.folder = self._scratch.path
        self._segments = Segments(self.folder, most_bytes=limit_bytes)
        self._slabs = slabs
        self._bin: deque[Slot] = deque()

    def write(self, buffers: Sequence[memoryview]) -> Stored:
        """Write the buffers; all of them or, with OSError, nothing."""
        self.empty_bin()
        sizes = tuple(b.nbytes for b in buffers)
        slot = self._segments.take(sum(sizes))
        try:
            segment.write(slot, [b.cast("B") for b in buffers if b.nbytes])
        except BaseException:
            self._segments.give_back([slot])
            raise
        return Stored(slot, sizes, self._bin)

    def empty(self, nbytes: int) -> np.ndarray:
        """Return room in host memory for a buffer."""
        # np.empty and preadv let go of the GIL; bytearray(n) holds it while it clears the memory
        return self._slabs.empty(nbytes) if self._slabs is not None else np.empty(nbytes, np.uint8)

    @property
    def limit_bytes(self) -> int:
        """The most that may lie there; 0: what the disk has."""
        return self._segments.limit_bytes

    @property
    def idle_bytes(self) -> int:
        """Memory that waits for the next buffer."""
        return self._slabs.free_bytes if self._slabs is not None else 0

    def trim(self) -> int:
        """Give that memory back to the system; return how much."""
        return self._slabs.trim() if self._slabs is not None else 0

    @property
    def has_waste(self) -> bool:
        """Whether there is room that nothing refers to any more."""
        return bool(self._bin)

    def empty_bin(self) -> None:
        """Let the room that nothing refers to any more be used again, or remove its files."""
        if self._bin:
            self._segments.give_back(self._emptied())

    @property
    def has_excess(self) -> bool:
        """Whether more room, or memory, is free than is kept to be used again."""
        return self._segments.has_excess or (self._slabs is not None and self._slabs.has_excess)

    def shrink(self) -> None:
        """Give back what is too much, or some of it: ask again while there is an excess."""
        self._segments.trim()
        if self._slabs is not None:
            self._slabs.shrink()

    def read(self, stored: Stored) -> list[np.ndarray]:
        """Return the buffers; OSError if they are not all there."""
        out = [self.empty(size) for size in stored.sizes]
        segment.read(stored.slot, [o.data for o in out if o.nbytes])
        return out

    def close(self) -> None:
        """Remove the folder; called once."""
        self._segments.close()
        self._scratch.remove()

    def _emptied(self) -> Iterator[Slot]:
        while self._bin:
            try:
                yield self._bin.popleft()
            except IndexError:  # emptied by another thread
                return
