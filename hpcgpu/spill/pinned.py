"""Page-locked host memory, which a GPU copies to and from by itself; of a bounded amount, and used again.

Locking pages is slow, about 5 GB/s (dask-cuda #98), so that what was locked once is kept. The driver takes the pages
in the thread that asks for them: under the memory policy of the worker, which is set before the worker starts threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from hpcgpu.spill.segments import round_up

_S = TypeVar("_S")


class _Loan:
    """What an array of the pool keeps alive; its memory goes back when no view is left."""

    __slots__ = ("__array_interface__", "_returned", "slab")

    def __init__(self, slab: np.ndarray, nbytes: int, returned: deque[np.ndarray]) -> None:
        self.__array_interface__: dict[str, Any] = {**slab.__array_interface__, "shape": (nbytes,)}
        self.slab, self._returned = slab, returned

    def __del__(self) -> None:
        # no lock here: gc may run this in a thread that holds it
        self._returned.append(self.slab)


class PinnedPool:
    """A pool of page-locked buffers.

    Parameters
    ----------
    limit_bytes : int
        How much the pool holds, lent or free.
    allocate : callable
        Returns so many bytes of page-locked memory, unlocked when nothing refers to them; MemoryError if there are
        none.

    """

    def __init__(self, limit_bytes: int, allocate: Callable[[int], np.ndarray]) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._returned: deque[np.ndarray] = deque()
        self._free: dict[int, list[np.ndarray]] = {}
        self._free_bytes = self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Page-locked memory, lent or free."""
        with self._lock:
            return self._held_bytes

    @property
    def free_bytes(self) -> int:
        """Page-locked memory that waits to be used again."""
        with self._lock:
            self._collect()
            return self._free_bytes

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return an array of bytes, whatever is in them; None when the pool is at its limit."""
        size = round_up(nbytes)
        with self._lock:
            self._collect()
            if slabs := self._free.get(size):
                self._free_bytes -= size
                return np.asarray(_Loan(slabs.pop(), nbytes, self._returned))
            over = self._held_bytes + size - self.limit_bytes
            if over > self._free_bytes:
                return None
            dropped = self._drop(over)
            self._held_bytes += size
        dropped.clear()  # unlocking pages is slow, too: others need not wait for it
        try:
            slab = self._allocate(size)
        except BaseException as e:
            with self._lock:
                self._held_bytes -= size
                if isinstance(e, MemoryError):
                    self.limit_bytes = self._held_bytes  # the system gives no more: it is not asked at every move
            if isinstance(e, MemoryError):
                return None
            raise
        return np.asarray(_Loan(slab, nbytes, self._returned))

    def _collect(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self._free.setdefault(slab.nbytes, []).append(slab)
            self._free_bytes += slab.nbytes

    def _drop(self, nbytes: int) -> list[np.ndarray]:
        """Take at least so much of what is free out of the pool, of the size that was asked for first on."""
        dropped: list[np.ndarray] = []
        for size, slabs in self._free.items():
            while slabs and nbytes > 0:
                dropped.append(slabs.pop())
                nbytes -= size
                self._free_bytes -= size
                self._held_bytes -= size
        return dropped


def is_pinned(array: np.ndarray) -> bool:
    """Tell whether an array is one that a pool has given out, as a whole."""
    return isinstance(array.base, _Loan)


def pieces(nbytes: int, size: int) -> Iterator[slice]:
    """Divide so many bytes into pieces of a size; the last one may be smaller."""
    return (slice(start, min(start + size, nbytes)) for start in range(0, nbytes, size))


def pipelined(
    parts: Iterator[slice],
    stages: Sequence[_S],
    start: Callable[[_S, slice], None],
    finish: Callable[[_S, slice], None],
) -> None:
    """Send the parts through the stages in turn: each stage's part is finished before the next one starts there."""
    under_way: deque[tuple[_S, slice]] = deque()
    for i, part in enumerate(parts):
        if len(under_way) == len(stages):
            finish(*under_way.popleft())
        stage = stages[i % len(stages)]
        start(stage, part)
        under_way.append((stage, part))
    while under_way:
        finish(*under_way.popleft())
