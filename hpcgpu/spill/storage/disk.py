"""The disk tier: objects in the segments of a private folder; and pools of host buffers. Values are pickled.

With a file for each object, small objects cost more than their bytes. Compared with zict.File, objects of 16 KiB are
written 11 times and read 2.6 times as fast in segments, objects of 8 MiB 1.2 and 1.5 times (``benchmarks/disk.py``).

Nothing is compressed. The disk of these figures takes 1 to 2 GB/s, with sync. One thread compresses by lz4 (zstd -1)
integers below 1000 at 0.8 (0.4) GB/s and numbers rounded to two digits at 0.7 (0.35); normally distributed numbers and
smooth functions shrink by 0 (8) % at most. Only arrays of nearly all zeros would gain.

Host buffers come in size classes: they are lent as arrays, and return when the last reference to an array goes. New
pages of memory are slow. Reading from the page cache into arrays, of which 64 MiB are kept, in the environment that
distributed's nanny sets, takes np.empty 2.4 GB/s for arrays of 8 MiB, 1.0 for 1 MiB and 256 KiB; the pool 11, 7.7 and
4.2. Page-locked buffers have a pool of their own (:mod:`hpcgpu.spill.storage.pinned`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.host.scratch import Scratch
from hpcgpu.spill.storage.lock import LeafLock
from hpcgpu.spill.storage.segments import PAGE_BYTES, Room, Segments, transfer

_S = TypeVar("_S")
# malloc takes smaller blocks from its heap, whose pages it uses again. It may map larger ones anew each time
# (M_MMAP_THRESHOLD: 4 MiB in our workers, 128 KiB with distributed's nanny).
SMALLEST_BYTES = 128 * 2**10
# The limit is that of the host tier, 0.6 of memory_limit: with an eighth of it more the process is still below 0.7.
_KEPT = 8
# distributed logs a value that cannot be pickled with its whole text, which may be as long as the memory is full
# (pickle.py, 2026.8.0). In the thread that pickles for the store this is left out: the store names the type, once.
_quiet = threading.local()


def round_up(nbytes: int) -> int:
    """Return the size of the buffer for ``nbytes``: whole pages, eight sizes from one power of two to the next."""
    step = max(PAGE_BYTES, 1 << max((nbytes - 1).bit_length() - 4, 0))
    return -(-nbytes // step) * step


class Loan:
    """The object that an array of a pool, and each view of it, keeps alive; any thread may drop the last reference."""

    __slots__ = ("__array_interface__", "pool", "slab")

    def __init__(self, slab: np.ndarray, nbytes: int, pool: Any) -> None:  # a Pool, or a PinnedPool
        # The array is no view of the slab: views of that view would refer to the slab itself, and not to this loan.
        self.__array_interface__: dict[str, Any] = {**slab.__array_interface__, "shape": (nbytes,)}
        self.slab, self.pool = slab, pool

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self.pool.returned.append(self.slab)


class Pool:
    """A bounded pool of host buffers for any thread: it lends arrays of shape (nbytes,) and dtype uint8, contiguous.

    Its lock is a leaf: memory is allocated and freed without it. ``allocate`` returns a slab of a size, in the thread
    that takes; when it raises MemoryError, ``limit_bytes`` falls to the bytes of the pool.
    """

    def __init__(self, limit_bytes: int, allocate: Callable[[int], np.ndarray]) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        self._lock = LeafLock()
        self.returned: deque[np.ndarray] = deque()
        self._free: dict[int, list[np.ndarray]] = {}
        self._free_bytes = self._held_bytes = 0  # that are free, or free and lent

    @property
    def is_empty(self) -> bool:
        """True if the pool holds no memory, free or lent; takes no lock."""
        return not self._held_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for reuse."""
        with self._lock:
            self._collect()
            return self._free_bytes

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return an array of bytes, not cleared; None if the pool is at its limit."""
        size = round_up(nbytes)
        with self._lock:
            self._collect()
            if slabs := self._free.get(size):
                self._free_bytes -= size
                return np.asarray(Loan(slabs.pop(), nbytes, self))
            over = self._held_bytes + size - self.limit_bytes
            if over > self._free_bytes:
                return None
            dropped = self._drop(over)
            self._held_bytes += size
        dropped.clear()  # to give memory back takes time, to unlock pages above all: others need not wait for it
        try:
            slab = self._allocate(size)
        except BaseException as e:
            with self._lock:
                self._held_bytes -= size
                if isinstance(e, MemoryError):
                    self.limit_bytes = self._held_bytes  # the system has no more: do not try again at every move
                    return None
            raise
        return np.asarray(Loan(slab, nbytes, self))

    def trim(self, nbytes: float = math.inf) -> int:
        """Give ``nbytes`` of free memory, or all of it, back to the system; return its bytes."""
        with self._lock:
            self._collect()
            dropped = self._drop(nbytes)
        return sum(slab.nbytes for slab in dropped)

    def _collect(self) -> None:
        while self.returned:
            slab = self.returned.popleft()
            self._free.setdefault(slab.nbytes, []).append(slab)
            self._free_bytes += slab.nbytes

    def _drop(self, nbytes: float) -> list[np.ndarray]:
        """Take at least ``nbytes`` of free memory out of the pool; the size that was first needed goes first."""
        dropped: list[np.ndarray] = []
        for size, slabs in self._free.items():
            while slabs and nbytes > 0:
                dropped.append(slabs.pop())
                nbytes -= size
                self._free_bytes -= size
                self._held_bytes -= size
        return dropped


class Slabs(Pool):
    """A pool of page-aligned host buffers, not page-locked; above its limit it gives ordinary arrays."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, _map)

    def empty(self, nbytes: int) -> np.ndarray:
        """Return an array of bytes, not cleared; its memory comes back with the last reference to it."""
        lent = self.take(nbytes) if nbytes >= SMALLEST_BYTES else None
        return np.empty(nbytes, np.uint8) if lent is None else lent

    @property
    def has_excess(self) -> bool:
        """True if more memory is free than the pool keeps for long."""
        return self.free_bytes > self.limit_bytes // _KEPT


def _map(size: int) -> np.ndarray:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size} bytes of host memory cannot be mapped: {e.strerror}") from e
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def pipelined(
    nbytes: int,
    size: int,
    stages: Sequence[_S],
    start: Callable[[_S, slice], None],
    finish: Callable[[_S, slice], None],
) -> None:
    """Send ``nbytes``, in parts of one size, through the stages in turn: each finishes a part, then starts the next."""
    under_way: deque[tuple[_S, slice]] = deque()
    for i, begin in enumerate(range(0, nbytes, size)):
        part = slice(begin, min(begin + size, nbytes))
        if len(under_way) == len(stages):
            finish(*under_way.popleft())
        stage = stages[i % len(stages)]
        start(stage, part)
        under_way.append((stage, part))
    while under_way:
        finish(*under_way.popleft())


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

    def __del__(self) -> None:
        # No file is removed here: keys are released on the event loop, and to remove a big file takes milliseconds.
        if self.slot:
            self._bin.append(self.slot)


class Disk:
    """A private folder below ``parent`` (default: TMPDIR), and the objects stored there, by threads that copy.

    Only the spill thread shrinks and closes it. It takes contiguous views of bytes, and returns arrays of shape
    (nbytes,) and dtype uint8, not page-locked. ConfigError if others can change a folder above ``parent``, unless
    ``trusted``. A limit of 0 means no limit but the disk's.
    """

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

    def empty_bin(self) -> None:
        """Make the room in the bin usable again, or remove its files."""
        if self.waste:
            rooms = []
            with contextlib.suppress(IndexError):  # it is empty, perhaps by another thread
                while True:
                    rooms.append(self.waste.popleft())
            self.segments.give_back(rooms)

    @property
    def has_excess(self) -> bool:
        """True if more room on disk, or more memory, is free than the store keeps."""
        return self.segments.has_excess or self.slabs.has_excess

    def shrink(self) -> None:
        """Give back some of the excess; call it again while :attr:`has_excess`."""
        self.segments.trim()
        self.slabs.trim(self.slabs.free_bytes - self.slabs.limit_bytes // _KEPT)

    def read(self, stored: Stored) -> list[np.ndarray]:
        """Return the buffers; OSError if any of them is missing."""
        out = [self.slabs.empty(size) for size in stored.sizes]  # bytearray(n) holds the GIL while it clears memory
        transfer(stored.slot, [o.data for o in out if o.nbytes], os.preadv)
        return out

    def close(self) -> None:
        """Remove the folder; called once."""
        self.segments.close()
        self._scratch.remove()


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
