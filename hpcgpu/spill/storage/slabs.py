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

import numpy as np

from hpcgpu.spill.storage.pool import Pool

# malloc takes what is smaller from its heap, whose pages it uses again. What is larger it maps anew each time
# (M_MMAP_THRESHOLD; it would learn, but not where MALLOC_TRIM_THRESHOLD_ is set, as distributed's nanny does).
SMALLEST_BYTES = 128 * 2**10


# Where the limit is that of the host tier (0.6 of memory_limit), an eighth of it more is still below 0.7.
_KEPT = 8


class Slabs(Pool):
    """A pool of page-aligned host buffers; above its limit arrays are of the ordinary kind.

    Those stand in the host tier beside what the pool has lent: more than a part of the limit is not kept for long.

    Any thread may call it, as every Pool; GpuSpillBuffer makes it for its Disk. None of its memory is page-locked.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, _map)

    def empty(self, nbytes: int) -> np.ndarray:
        """Return an array of bytes, whatever is in them; its memory comes back when nothing refers to it any more."""
        lent = self.take(nbytes) if nbytes >= SMALLEST_BYTES else None
        return np.empty(nbytes, np.uint8) if lent is None else lent

    @property
    def has_excess(self) -> bool:
        """Whether more waits to be used again than is kept."""
        return self.free_bytes > self.limit_bytes // _KEPT

    def shrink(self) -> None:
        """Give back what is more than is kept."""
        self.trim(self.limit_bytes // _KEPT)


def _map(size: int) -> np.ndarray:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size} bytes of host memory cannot be mapped: {e.strerror}") from e
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
