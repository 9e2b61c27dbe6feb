"""The disk tier: files in a private folder, room reserved before writing."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections import deque
from collections.abc import Sequence

import numpy as np

from hpcgpu.spill.scratch import Scratch

# What a file system says that knows no fallocate.
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Stored:
    """A file with some buffers, one after the other; in the bin when nothing refers to it any more."""

    __slots__ = ("_bin", "path", "sizes")

    def __init__(self, path: str, sizes: tuple[int, ...], bin_: deque[str]) -> None:
        self.path, self.sizes, self._bin = path, sizes, bin_

    def __del__(self) -> None:
        # not removed here: keys are released on the event loop, and a big file takes milliseconds
        self._bin.append(self.path)


class Disk:
    """A private folder below ``parent`` (default: TMPDIR), and its files."""

    def __init__(self, parent: str | None) -> None:
        self._scratch = Scratch.make(parent, "spill")
        self.folder = self._scratch.path
        self._numbers = itertools.count()
        self._bin: deque[str] = deque()

    def write(self, buffers: Sequence[memoryview]) -> Stored:
        """Write the buffers to a new file; all of them or, with OSError, nothing."""
        self.empty_bin()
        sizes = tuple(b.nbytes for b in buffers)
        path = f"{self.folder}/{next(self._numbers)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _reserve(fd, sum(sizes))
            offset = 0
            for buffer in buffers:
                offset = _write_all(fd, buffer, offset)
        except BaseException:
            os.close(fd)
            os.unlink(path)  # noqa: PTH108
            raise
        os.close(fd)
        return Stored(path, sizes, self._bin)

    @property
    def has_waste(self) -> bool:
        """Whether there are files to remove."""
        return bool(self._bin)

    def empty_bin(self) -> None:
        """Remove the files that nothing refers to any more."""
        with contextlib.suppress(IndexError):  # empty, or emptied by another thread
            while True:
                path = self._bin.popleft()
                with contextlib.suppress(FileNotFoundError):  # the whole folder went first
                    os.unlink(path)  # noqa: PTH108

    def read(self, stored: Stored) -> list[np.ndarray]:
        """Return the buffers of a file; OSError if they are not all there."""
        out = []
        fd = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = 0
            for size in stored.sizes:
                out.append(_read_all(fd, size, offset, stored.path))
                offset += size
        finally:
            os.close(fd)
        return out

    def close(self) -> None:
        """Remove the folder; called once."""
        self._scratch.remove()


def _reserve(fd: int, nbytes: int) -> None:
    """Have a full disk say so now, and not by a short write in the middle."""
    if not nbytes:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as e:
        if e.errno not in _NO_FALLOCATE:
            raise


def _write_all(fd: int, buffer: memoryview, offset: int) -> int:
    view = buffer.cast("B")
    while view:
        done = os.pwrite(fd, view, offset)  # may be short; EINTR is Python's affair (PEP 475)
        view, offset = view[done:], offset + done
    return offset


def _read_all(fd: int, size: int, offset: int, path: str) -> np.ndarray:
    # np.empty and preadv let go of the GIL; bytearray(n) holds it while it clears the memory
    out = np.empty(size, np.uint8)
    view = out.data
    while view:
        done = os.preadv(fd, [view], offset)
        if not done:
            raise OSError(f"{path} is cut off: {len(view)} of {size} bytes are missing")
        view, offset = view[done:], offset + done
    return out
