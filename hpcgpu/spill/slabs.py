"""Host buffers that are used again, since new pages of memory are slow.

Reading from the page cache into arrays of which 64 MiB are kept, with the environment of distributed's nanny, GB/s:

==========  =====  =====  =======
array       8 MiB  1 MiB  256 KiB
==========  =====  =====  =======
np.empty    2.4    1.0    1.0
the pool    11     7.7    4.2
==========  =====  =====  =======
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from typing import Any

import numpy as np

from hpcgpu.spill.segments import round_up

# malloc takes what is smaller from its heap, whose pages it uses again. What is larger it maps anew each time
# (M_MMAP_THRESHOLD; it would learn, but not where MALLOC_TRIM_THRESHOLD_ is set, as distributed's nanny does).
SMALLEST_BYTES = 128 * 2**10


class _Loan:
    """What an array of the pool keeps alive, and its views through it."""

    __slots__ = ("__array_interface__", "_returned", "slab")

    def __init__(self, slab: np.ndarray, nbytes: int, returned: deque[np.ndarray]) -> None:
        # not a view of the slab: views of the view would refer to the slab, past it
        self.__array_interface__: dict[str, Any] = {**slab.__array_interface__, "shape": (nbytes,)}
        self.slab, self._returned = slab, returned

    def __del__(self) -> None:
        # no lock here: gc may run this in a thread that holds it
        self._returned.append(self.slab)


class Slabs:
    """A pool of page-aligned host buffers.

    Parameters
    ----------
    limit_bytes : int
        How much the pool holds, lent or free; above it arrays are of the ordinary kind.

    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._returned: deque[np.ndarray] = deque()
        self._free: dict[int, list[np.ndarray]] = {}
        self._free_bytes = self._held_bytes = 0

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

    def empty(self, nbytes: int) -> np.ndarray:
        """Return an array of bytes, whatever is in them; its memory comes back when nothing refers to it any more."""
        if nbytes < SMALLEST_BYTES:
            return np.empty(nbytes, np.uint8)
        slab = self._take(round_up(nbytes))
        if slab is None:
            return np.empty(nbytes, np.uint8)
        return np.asarray(_Loan(slab, nbytes, self._returned))

    def trim(self) -> int:
        """Give all free memory back to the system; return how much."""
        with self._lock:
            self._collect()
            return self._drop(self._free_bytes)

    def _take(self, size: int) -> np.ndarray | None:
        with self._lock:
            self._collect()
            if slabs := self._free.get(size):
                self._free_bytes -= size
                return slabs.pop()
            over = self._held_bytes + size - self.limit_bytes
            if over > self._free_bytes:
                return None
            self._drop(over)
            self._held_bytes += size
        try:
            return _map(size)
        except BaseException:
            with self._lock:
                self._held_bytes -= size
            raise

    def _collect(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self._free.setdefault(slab.nbytes, []).append(slab)
            self._free_bytes += slab.nbytes

    def _drop(self, nbytes: int) -> int:
        """Unmap at least so much of what is free, of the size that was asked for first on."""
        dropped = 0
        for size, slabs in self._free.items():
            while slabs and dropped < nbytes:
                slabs.pop()
                dropped += size
        self._free_bytes -= dropped
        self._held_bytes -= dropped
        return dropped


def _map(size: int) -> np.ndarray:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size} bytes of host memory cannot be mapped: {e.strerror}") from e
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
