"""Memory that is used again: buffers by size class, lent as arrays, and back when nothing refers to them any more."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

_PAGE_BYTES = 4096


def round_up(nbytes: int) -> int:
    """Return the size of the buffer for so many bytes: whole pages, eight sizes from one power of two to the next."""
    step = max(_PAGE_BYTES, 1 << max((nbytes - 1).bit_length() - 4, 0))
    return -(-nbytes // step) * step


class Loan:
    """What an array of a pool keeps alive, and its views through it.

    Immutable; Pool makes it. Any thread may let it go last: the slab (uint8 of shape (size,), of which the array shows
    the first ``nbytes``) comes back without a lock.
    """

    __slots__ = ("__array_interface__", "_returned", "slab")

    def __init__(self, slab: np.ndarray, nbytes: int, returned: deque[np.ndarray]) -> None:
        # not a view of the slab: views of the view would refer to the slab, past it
        self.__array_interface__: dict[str, Any] = {**slab.__array_interface__, "shape": (nbytes,)}
        self.slab, self._returned = slab, returned

    def __del__(self) -> None:
        # no lock here: gc may run this in a thread that holds it
        self._returned.append(self.slab)


class Pool:
    """A bounded pool of host buffers: it lends arrays of shape (nbytes,) and dtype uint8, contiguous.

    Any thread may call it; its lock is a leaf: memory is allocated and freed without it.

    Parameters
    ----------
    limit_bytes : int
        How much the pool holds, lent or free; it falls to what there is when ``allocate`` raises MemoryError.
    allocate : callable
        Returns so many bytes, uint8 of shape (bytes,), which are given back when nothing refers to them; MemoryError if
        there are none. Called in the thread that takes.

    """

    loan: type[Loan] = Loan

    def __init__(self, limit_bytes: int, allocate: Callable[[int], np.ndarray]) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._returned: deque[np.ndarray] = deque()
        self._free: dict[int, list[np.ndarray]] = {}
        self._free_bytes = self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Memory of the pool, lent or free."""
        with self._lock:
            return self._held_bytes

    @property
    def free_bytes(self) -> int:
        """Memory that waits to be used again."""
        with self._lock:
            self._collect()
            return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """Memory that arrays have."""
        with self._lock:
            self._collect()
            return self._held_bytes - self._free_bytes

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return an array of bytes, whatever is in them; None when the pool is at its limit."""
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
        dropped.clear()  # giving memory back takes time, unlocking pages above all: others need not wait for it
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
        return np.asarray(self.loan(slab, nbytes, self._returned))

    def trim(self, kept_bytes: int = 0) -> int:
        """Give free memory back to the system, but for ``kept_bytes``; return how much."""
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
        """Take at least so much of what is free out of the pool, of the size that was asked for first on."""
        dropped: list[np.ndarray] = []
        for size, slabs in self._free.items():
            while slabs and nbytes > 0:
                dropped.append(slabs.pop())
                nbytes -= size
                self._free_bytes -= size
                self._held_bytes -= size
        return dropped
