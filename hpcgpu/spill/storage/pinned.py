"""Page-locked host memory: chunks of one stretch of addresses, from which buffers of all sizes are carved.

A GPU copies to and from page-locked memory by itself. To allocate 64 MiB of it by cuMemHostAlloc takes 22 ms (H200),
and each launch of a kernel waits meanwhile. Here several threads touch the pages of a chunk, huge ones where the kernel
has some, and the driver then only registers them (cudf #23457: 4 GiB in 0.38 in place of 1.97 s). Registered pages are
ordinary ones for the kernel: other processes can copy from them. A child that is forked does not get them
(MADV_DONTFORK): else the first write after a fork would go to other pages than those that the GPU knows.

Together: the threads that touch a chunk's pages also copy into them, as one is slower than the GPU's link.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hpcgpu.spill.storage.disk import Loan
from hpcgpu.spill.storage.lock import LeafLock
from hpcgpu.spill.storage.segments import PAGE_BYTES

# What the driver locks at once: its lock is free again after each chunk.
CHUNK_BYTES = 64 * 2**20
_HUGE_BYTES = 2 * 2**20
# After a chunk that could not be locked.
_RETRY_S = 1.0
# More threads than these gain little: one copies 4 to 10 GB/s (H200), and the memory of a GPU's part of a node 50.
_MOST_THREADS = 4
_PART_BYTES = 2**20  # at least so much for each thread
_UNLOCKED, _BUSY, _LOCKED = range(3)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_count(), "hpcgpu-pinned")


@functools.cache
def _count() -> int:
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def _bounds(nbytes: int) -> list[slice]:
    """Cut bytes into a part for each thread, at pages."""
    count = max(1, min(_count(), nbytes // _PART_BYTES))
    ends = [nbytes * i // count // PAGE_BYTES * PAGE_BYTES for i in range(count)] + [nbytes]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _in_threads(work: Callable[[slice], None], parts: list[slice]) -> None:
    others = [_threads().submit(work, part) for part in parts[1:]]
    work(parts[0])
    for each in others:
        each.result()


def copy_bytes(target: np.ndarray, source: np.ndarray) -> None:
    """Copy bytes, many of them by several threads: one thread is slower than the GPU's link."""
    if target.nbytes < 2 * _PART_BYTES:
        np.copyto(target, source)
    else:
        _in_threads(lambda part: np.copyto(target[part], source[part]), _bounds(target.nbytes))


def touch(memory: np.ndarray) -> None:
    """Let the kernel give pages to new memory, by several threads."""
    _in_threads(lambda part: memory[part][::PAGE_BYTES].fill(0), _bounds(memory.nbytes))


class PinnedPool:
    """A bounded pool of page-locked buffers for any thread: it lends arrays of shape (nbytes,) and dtype uint8.

    Its lock is a leaf: pages are locked and unlocked without it. ``lock`` and ``unlock`` get a chunk. When ``lock``
    raises MemoryError, the pool does not grow for a second.
    """

    def __init__(
        self, limit_bytes: int, lock: Callable[[np.ndarray], None], unlock: Callable[[np.ndarray], None]
    ) -> None:
        self.limit_bytes = limit_bytes  # as it is at the first use, or less
        self._lock_pages, self._unlock_pages = lock, unlock
        self._lock = LeafLock()
        self.returned: deque[np.ndarray] = deque()
        self._map: mmap.mmap | None = None
        self._memory, self._offset = np.empty(0, np.uint8), 0  # all its addresses; where they begin in the map
        self._states: list[int] = []  # of the chunks
        # free stretches of locked memory: begin to end, end to begin, and (bytes, begin) in their order
        self._ends, self._begins, self._sizes = dict[int, int](), dict[int, int](), list[tuple[int, int]]()
        self._free_bytes = self._held_bytes = 0  # that are free, or free and lent
        self._retry_s = -math.inf

    def __del__(self) -> None:
        self.trim()  # nothing is lent, and the addresses of pages that stay locked would be given to others

    @property
    def free_bytes(self) -> int:
        """Bytes that are locked, and not lent."""
        with self._lock:
            self._collect()
            return self._free_bytes

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return an array of bytes, not cleared; None if the pool is at its limit, or no page can be locked now."""
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        while True:
            with self._lock:
                self._collect()
                if (i := bisect_left(self._sizes, (size, 0))) < len(self._sizes):  # the least that fits
                    (_, begin), end = self._sizes[i], self._ends[self._sizes[i][1]]
                    self._remove(begin, end)
                    self._add(begin + size, end)
                    return np.asarray(Loan(self._memory[begin : begin + size], nbytes, self))
                chunks = self._chunks_for(size)
            if not chunks or not self._locked(chunks):
                return None

    def lock_ahead(self, nbytes: int) -> bool:
        """Lock one chunk if fewer bytes are free; return whether the next one is due."""
        with self._lock:
            self._collect()
            chunks = self._chunks_for(1) if self._free_bytes < nbytes else range(0)
        return bool(chunks) and self._locked(chunks)

    def trim(self, nbytes: float = math.inf) -> int:
        """Unlock ``nbytes`` or more of free chunks, or all of them; return their bytes."""
        chosen: list[int] = []
        with self._lock:
            self._collect()
            for begin, end in sorted(self._ends.items(), reverse=True):
                last = len(self._states) if end == self._memory.nbytes else end // CHUNK_BYTES
                first, low = -(-begin // CHUNK_BYTES), last
                while low > first and nbytes > 0:
                    low -= 1
                    nbytes -= self._chunk(low).nbytes
                if low < last:
                    self._remove(begin, end)
                    self._add(begin, low * CHUNK_BYTES)
                    self._add(min(last * CHUNK_BYTES, end), end)
                    chosen += range(low, last)
            for i in chosen:
                self._states[i] = _BUSY
        for i in chosen:
            self._unlock_pages(self._chunk(i))
            self._advise(i, mmap.MADV_DONTNEED)
        return self._note(chosen, _UNLOCKED)

    def parts(self, array: np.ndarray) -> list[slice]:
        """Cut an array of this pool at its chunks: CUDA refuses a copy that spans two registered ranges."""
        begin, out = array.ctypes.data - self._memory.ctypes.data, [0]
        out += range(CHUNK_BYTES - begin % CHUNK_BYTES, array.nbytes, CHUNK_BYTES)
        return [slice(*pair) for pair in zip(out, [*out[1:], array.nbytes], strict=True)]

    def _chunk(self, i: int) -> np.ndarray:
        return self._memory[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]

    def _chunks_for(self, size: int) -> range:
        """Return unlocked chunks that make room for a buffer, beside free memory, and note that they are locked now."""
        if time.monotonic() < self._retry_s or self._held_bytes >= self.limit_bytes:
            return range(0)
        if self._map is None:
            self._reserve()
        for first, end in self._runs():
            begin = self._begins.get(first * CHUNK_BYTES, first * CHUNK_BYTES)
            stop = min(end, max(first + 1, -(-(begin + size) // CHUNK_BYTES)))
            edge = min(stop * CHUNK_BYTES, self._memory.nbytes)
            edge = self._ends.get(edge, edge)
            more = min(stop * CHUNK_BYTES, self._memory.nbytes) - first * CHUNK_BYTES
            if begin + size <= edge and self._held_bytes + more <= self.limit_bytes:
                self._held_bytes += more
                self._states[first:stop] = [_BUSY] * (stop - first)
                return range(first, stop)
        return range(0)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield first and end of each run of unlocked chunks."""
        first = 0
        while _UNLOCKED in self._states[first:]:
            first = self._states.index(_UNLOCKED, first)
            end = next((i for i in range(first, len(self._states)) if self._states[i]), len(self._states))
            yield first, end
            first = end

    def _reserve(self) -> None:
        nbytes = self.limit_bytes // PAGE_BYTES * PAGE_BYTES
        try:
            self._map = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError):  # no addresses (ulimit -v), or a limit of 0
            self._retry_s = math.inf
            return
        whole = np.frombuffer(self._map, np.uint8)
        self._offset = -whole.ctypes.data % _HUGE_BYTES
        self._memory = whole[self._offset : self._offset + nbytes]
        self._states = [_UNLOCKED] * -(-nbytes // CHUNK_BYTES)

    def _locked(self, chunks: range) -> bool:
        """Lock chunks; return whether all of them are."""
        done: list[int] = []
        try:
            for i in chunks:
                for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
                    with contextlib.suppress(OSError):  # a kernel without huge pages
                        self._advise(i, advice)
                self._lock_pages(self._chunk(i))
                done.append(i)
        except MemoryError:
            self._retry_s = time.monotonic() + _RETRY_S
        finally:
            self._note(done, _LOCKED)
            rest = chunks[len(done) :]
            for i in rest:
                self._advise(i, mmap.MADV_DONTNEED)
            self._note(rest, _UNLOCKED)
        return len(done) == len(chunks)

    def _note(self, chunks: list[int] | range, state: int) -> int:
        """Note what became of chunks, and return their bytes."""
        with self._lock:
            for i in chunks:
                self._states[i] = state
                if state == _LOCKED:
                    self._add(i * CHUNK_BYTES, i * CHUNK_BYTES + self._chunk(i).nbytes)
            nbytes = sum(self._chunk(i).nbytes for i in chunks)
            self._held_bytes -= nbytes if state == _UNLOCKED else 0
        return nbytes

    def _advise(self, i: int, advice: int) -> None:
        assert self._map is not None
        self._map.madvise(advice, self._offset + i * CHUNK_BYTES, self._chunk(i).nbytes)

    def _collect(self) -> None:
        while self.returned:
            slab = self.returned.popleft()
            begin = slab.ctypes.data - self._memory.ctypes.data
            self._add(begin, begin + slab.nbytes)

    def _add(self, begin: int, end: int) -> None:
        """Make a stretch free, joined to its free neighbours."""
        if begin == end:
            return
        self._free_bytes += end - begin
        before, after = self._begins.get(begin), self._ends.get(end)
        if before is not None:
            self._forget(before, begin)
            begin = before
        if after is not None:
            self._forget(end, after)
            end = after
        self._ends[begin], self._begins[end] = end, begin
        insort(self._sizes, (end - begin, begin))

    def _remove(self, begin: int, end: int) -> None:
        self._forget(begin, end)
        self._free_bytes -= end - begin

    def _forget(self, begin: int, end: int) -> None:
        del self._ends[begin], self._begins[end]
        del self._sizes[bisect_left(self._sizes, (end - begin, begin))]


def is_pinned(array: np.ndarray) -> bool:
    """Tell whether an array is a whole array of a pool of page-locked buffers."""
    return isinstance(array.base, Loan) and isinstance(array.base.pool, PinnedPool)
