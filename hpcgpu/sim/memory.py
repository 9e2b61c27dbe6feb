"""Memory of simulated GPUs, with reuse of freed blocks like CuPy's memory pool, and its use in a file.

New pages are slow: filling them takes 0.08 CPU seconds per GB longer than filling used pages, and 2.2 on a virtual
machine that returns free pages to its host (free page reporting, Linux 6.18).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# The characters of the dtypes of CuPy's kernels (cupy/_core/_dtype.pyx).
NUMBERS = frozenset("?bBhHiIlLqQefdFD")
# Before, a result's dtype depends on the values of numbers, and ufunc.resolve_dtypes does not return it (NEP 50).
_NUMPY_2 = np.lib.NumpyVersion(np.__version__) >= "2.0.0"
_COUNTER_BYTES = 8
# malloc reuses smaller blocks itself.
_SMALLEST_BYTES = 128 * 2**10


class Memory(np.ndarray):
    """A buffer's memory: shape (nbytes,), dtype uint8; its block comes back with the last reference, in any thread."""

    # set only in the memory itself, not in the views of it that numpy makes
    home: Blocks | None = None
    block: mmap.mmap

    def __del__(self) -> None:
        if self.home is not None:
            self.home.keep(self.block)


class Blocks:
    """Lends memory, and keeps up to ``most_bytes`` of returned blocks; calls ``changed`` if ``nbytes`` changes."""

    # without a lock: the garbage collector may return memory in any thread, and ``changed`` is called there

    def __init__(self, most_bytes: int, changed: Callable[[], None]) -> None:
        self._most_bytes, self._changed = most_bytes, changed
        self._kept: deque[mmap.mmap] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(map(len, tuple(self._kept)))

    def take(self, nbytes: int) -> Memory:
        """Return ``nbytes`` of memory, not cleared."""
        if nbytes < _SMALLEST_BYTES:
            return Memory(nbytes, np.uint8)
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for block in tuple(self._kept):
            if len(block) == size:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._kept.remove(block)
                    break
        else:
            block = _map(size)
        # numpy makes a block the base of its memory, and the memory that of its arrays, since their types differ
        memory: Any = np.ndarray.__new__(Memory, (nbytes,), np.uint8, block)
        memory.block, memory.home = block, self
        return memory

    def keep(self, block: mmap.mmap) -> None:
        """Keep a returned block."""
        if len(block) <= self._most_bytes:
            self._kept.append(block)
            self._drop(self._most_bytes)
            self._changed()

    def shrink(self, most_bytes: int) -> None:
        """Free kept blocks, the oldest first, until at most ``most_bytes`` are left."""
        if self._drop(most_bytes):
            self._changed()

    def _drop(self, most_bytes: int) -> bool:
        count = len(self._kept)
        while self._kept and self.nbytes > most_bytes:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._kept.popleft()
        return len(self._kept) < count


def result_like(ufunc: np.ufunc, inputs: Sequence[Any]) -> np.ndarray | None:
    """Return an untouched array with the dtype, shape and strides of a large result."""
    # None for small results, and where numpy must decide: the caller lets numpy make the result.
    large = any(isinstance(x, np.ndarray) and x.nbytes >= _SMALLEST_BYTES for x in inputs)
    if not (large and _NUMPY_2) or ufunc.nout != 1 or ufunc.signature is not None:
        return None
    operands: list[Any] = [*inputs, None]
    flags: list[Any] = [*[["readonly"]] * len(inputs), ["writeonly", "allocate"]]
    kinds = [x.dtype if isinstance(x, (np.ndarray, np.generic)) else type(x) for x in inputs]
    try:
        dtype = ufunc.resolve_dtypes((*kinds, None))[-1]
        result = np.nditer(operands, ["zerosize_ok"], flags, [*[None] * len(inputs), dtype], order="K").operands[-1]
    except (TypeError, ValueError):  # not for this ufunc, or the inputs do not fit: numpy's own error comes then
        return None
    return result if dtype.char in NUMBERS else None


def _map(size: int) -> mmap.mmap:
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(f"{size} bytes of host memory cannot be mapped: {e.strerror}") from e
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def root_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns an array's memory."""
    base = array.base
    while base is not None:
        if isinstance(base, np.ndarray):
            array = base
        # np.lib.stride_tricks puts an object of its own between a view and its array (numpy 2.4)
        base = getattr(base, "base", None)
    return array


def bytes_of(root: np.ndarray) -> np.ndarray:
    """Return the memory of an owner as bytes; it is contiguous in some order of axes."""
    order = sorted(range(root.ndim), key=lambda axis: -root.strides[axis])
    return root.transpose(order).reshape(-1).view(np.uint8)


class Usage:
    """A number of bytes in a file: the host memory that other processes leave out, read by :func:`read_usage_bytes`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as f:
            f.write(bytes(_COUNTER_BYTES))
            f.flush()
            self._counter = mmap.mmap(f.fileno(), _COUNTER_BYTES)

    def publish(self, nbytes: int) -> None:
        """Write the number."""
        self._counter[:] = nbytes.to_bytes(_COUNTER_BYTES, "little")


def read_usage_bytes(path: str | os.PathLike[str]) -> int:
    """Return the host memory that a simulated GPU of another process takes; 0 without such a file."""
    try:
        return int.from_bytes(Path(path).read_bytes(), "little")
    except OSError:
        return 0
