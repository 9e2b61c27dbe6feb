"""Pools of host buffers in size classes: lent as arrays, returned when the last reference to an array goes.

The lock of the store, and of its parts, is here, too: a leaf that no thread takes twice.

New pages of memory are slow. Reading from the page cache into arrays, of which 64 MiB are kept, in the environment that
distributed's nanny sets, GB/s:

==========  =====  =====  =======
array       8 MiB  1 MiB  256 KiB
==========  =====  =====  =======
np.empty    2.4    1.0    1.0
the pool    11     7.7    4.2
==========  =====  =====  =======

A GPU copies to and from page-locked memory by itself. Locking pages is slower still, about 5 GB/s (dask-cuda #98). The
driver allocates such pages in the calling thread: under the memory policy of the worker, which is set before the worker
starts threads.
"""

from __future__ import annotations

import _thread
import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcgpu.errors import SpillError


class ReenteredError(SpillError):
    """A thread calls a store while it is inside a store; the next try may succeed."""

    def __init__(self) -> None:
        super().__init__(
            "the spill store is in use by this thread: a __del__ that the garbage collector runs, or a signal handler, "
            "reads, stores or deletes a value during another such call"
        )


class LeafLock(_thread.RLock):  # type: ignore[misc] # final for type checkers only
    """A lock that raises instead of waiting for its own thread. Any thread may take it."""

    # The garbage collector runs a user's __del__ wherever Python code runs, and signals run their handlers: also in a
    # thread that has the lock. A touch of a proxy there would wait for its own thread for ever. It is one of Python's
    # own locks, since an __exit__ in Python would double its time.

    _is_owned: Callable[[], bool]  # threading.Condition calls it, too

    def __init__(self) -> None:
        _LOCKS.append(weakref.ref(self, _LOCKS.remove))

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():
            raise ReenteredError
        return self.acquire()

    @property
    def is_mine(self) -> bool:
        """True if the calling thread has it."""
        return self._is_owned()


_LOCKS: list[weakref.ref[LeafLock]] = []


def is_inside() -> bool:
    """Tell whether the calling thread has the lock of any store: then it must not wait for other threads."""
    return any(lock.is_mine for each in tuple(_LOCKS) if (lock := each()) is not None)


_S = TypeVar("_S")
_PAGE_BYTES = 4096
# malloc takes smaller blocks from its heap, whose pages it uses again, and maps larger ones anew each time
# (M_MMAP_THRESHOLD; malloc would raise it, but not if MALLOC_TRIM_THRESHOLD_ is set, and distributed's nanny sets it).
SMALLEST_BYTES = 128 * 2**10
# The limit is that of the host tier, 0.6 of memory_limit: with an eighth of it more the process is still below 0.7.
_KEPT = 8


def round_up(nbytes: int) -> int:
    """Return the size of the buffer for ``nbytes``: whole pages, eight sizes from one power of two to the next."""
    step = max(_PAGE_BYTES, 1 << max((nbytes - 1).bit_length() - 4, 0))
    return -(-nbytes // step) * step


class Loan:
    """The object that an array of a pool, and each view of it, keeps alive; any thread may drop the last reference."""

    __slots__ = ("__array_interface__", "_returned", "slab")

    def __init__(self, slab: np.ndarray, nbytes: int, returned: deque[np.ndarray]) -> None:
        # The array is no view of the slab: views of that view would refer to the slab itself, and not to this loan.
        self.__array_interface__: dict[str, Any] = {**slab.__array_interface__, "shape": (nbytes,)}
        self.slab, self._returned = slab, returned

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self._returned.append(self.slab)


class Pool:
    """A bounded pool of host buffers for any thread: it lends arrays of shape (nbytes,) and dtype uint8, contiguous."""

    # Its lock is a leaf: memory is allocated and freed without it. ``allocate`` returns a slab of a size, in the thread
    # that takes; when it raises MemoryError, ``limit_bytes`` falls to the bytes of the pool.

    loan: type[Loan] = Loan

    def __init__(self, limit_bytes: int, allocate: Callable[[int], np.ndarray]) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        self._lock = LeafLock()
        self._returned: deque[np.ndarray] = deque()
        self._free: dict[int, list[np.ndarray]] = {}
        self._free_bytes = self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the pool, lent or free."""
        with self._lock:
            return self._held_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for reuse."""
        with self._lock:
            self._collect()
            return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are lent."""
        with self._lock:
            self._collect()
            return self._held_bytes - self._free_bytes

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return an array of bytes, not cleared; None if the pool is at its limit."""
        size = round_up(nbytes)
        with self._lock:
            self._collect()
            if slabs := self._free.get(size):
                self._free_bytes -= size
                return np.asarray(self.loan(slabs.pop(), nbytes, self._returned))
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
            if isinstance(e, MemoryError):
                return None
            raise
        return np.asarray(self.loan(slab, nbytes, self._returned))

    def trim(self, kept_bytes: int = 0) -> int:
        """Give free memory back to the system, except ``kept_bytes``; return its bytes."""
        with self._lock:
            self._collect()
            dropped = self._drop(self._free_bytes - kept_bytes)
        return sum(slab.nbytes for slab in dropped)

    def _collect(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self._free.setdefault(slab.nbytes, []).append(slab)
            self._free_bytes += slab.nbytes

    def _drop(self, nbytes: int) -> list[np.ndarray]:
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

    def shrink(self) -> None:
        """Give this excess back."""
        self.trim(self.limit_bytes // _KEPT)


def _map(size: int) -> np.ndarray:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size} bytes of host memory cannot be mapped: {e.strerror}") from e
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class _PinnedLoan(Loan):
    """The loan of an array in page-locked memory."""

    __slots__ = ()


class PinnedPool(Pool):
    """A pool of page-locked buffers. DriverCopies makes two: for buffers that are copied whole, and for stages."""

    loan = _PinnedLoan


def is_pinned(array: np.ndarray) -> bool:
    """Tell whether an array is a whole array of a pool of page-locked buffers."""
    return isinstance(array.base, _PinnedLoan)


def pieces(nbytes: int, size: int) -> Iterator[slice]:
    """Divide ``nbytes`` into pieces of one size; the last piece may be smaller."""
    return (slice(start, min(start + size, nbytes)) for start in range(0, nbytes, size))


def pipelined(
    parts: Iterator[slice],
    stages: Sequence[_S],
    start: Callable[[_S, slice], None],
    finish: Callable[[_S, slice], None],
) -> None:
    """Send parts through the stages in turn: a stage finishes its part before it starts the next one."""
    under_way: deque[tuple[_S, slice]] = deque()
    for i, part in enumerate(parts):
        if len(under_way) == len(stages):
            finish(*under_way.popleft())
        stage = stages[i % len(stages)]
        start(stage, part)
        under_way.append((stage, part))
    while under_way:
        finish(*under_way.popleft())
