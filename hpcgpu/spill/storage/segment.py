"""A file of the disk tier: made longer, written to and read in pieces, and with holes where nothing lies any more."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from hpcgpu.spill.storage.extents import PAGE_BYTES, Extent

_MOST_VIEWS = 1024  # UIO_MAXIOV (linux/uio.h)
# What a file system says that knows no fallocate, or none that makes holes (fallocate(2)).
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE (linux/falloc.h)

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Have a full disk say so now; where that cannot be, only make the file longer.

    Not posix_fallocate: where the file system has none, glibc writes a byte to each block.
    """
    if not _allocated(fd, 0, start, nbytes):
        os.ftruncate(fd, start + nbytes)


def _allocated(fd: int, mode: int, start: int, nbytes: int) -> bool:
    """Call fallocate; return whether the file system knows it."""
    while _fallocate(fd, mode, start, nbytes):
        code = ctypes.get_errno()
        if code in _NO_FALLOCATE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


class Descriptor:
    """A file descriptor that is closed when nobody uses it any more: also by who reads while the store is closed.

    Immutable; Segment makes it. Any thread may use its ``number``, by offsets alone: threads share its position.
    """

    __slots__ = ("number",)

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Segment:
    """A file.

    Segments makes it, and changes it under its own lock; but the one thread that removes the file sets ``kept`` and
    ``is_stuck`` without. Any thread may read, write and make holes without that lock. All sizes are in bytes.

    Attributes
    ----------
    end : int
        Where what was reserved of it ends.
    used_bytes, held_bytes : int
        What lies in it; what it takes on the file system, with the list of where it lies.
    is_shut : bool
        Its free room is used no more: it is to be removed, or something is wrong with it.
    is_stuck : bool
        It could not be removed.
    kept : Descriptor or None
        It is open.

    """

    __slots__ = ("_list_bytes", "end", "held_bytes", "is_shut", "is_stuck", "kept", "path", "used_bytes")

    def __init__(self, path: Path) -> None:
        self.path, self.end, self.used_bytes = path, 0, 0
        self.held_bytes = self._list_bytes = PAGE_BYTES
        self.is_shut = self.is_stuck = False
        self.kept: Descriptor | None = Descriptor(path, os.O_CREAT | os.O_EXCL)

    def open(self) -> Descriptor:
        """Return the file, to read and to write."""
        return self.kept or Descriptor(self.path)

    def whole(self) -> Descriptor:
        """Return the file; OSError if somebody cut it off."""
        file = self.open()
        # a write behind the end of a file that was cut would turn what is lost into zeros
        if (there := os.fstat(file.number).st_size) < self.end:
            raise OSError(f"{self.path} is cut off: {there} of {self.end} bytes are left")
        return file

    def hole(self, start: int, nbytes: int) -> Descriptor | None:
        """Give room back to the file system; return the file, or None if that cannot be done there."""
        file = self.open()
        return file if _allocated(file.number, _HOLE, start, nbytes) else None

    def growth(self, hole: Descriptor, nbytes: int) -> int:
        """Return by how much more it takes with a new hole of so many bytes, which makes its list longer."""
        before, room_bytes = self._list_bytes, self.held_bytes - self._list_bytes - nbytes
        self._list_bytes = max(os.fstat(hole.number).st_blocks * 512 - room_bytes, PAGE_BYTES)
        return self._list_bytes - before - nbytes

    def cut(self, start: int) -> None:
        """Give all room from here on back."""
        file = self.open()
        os.ftruncate(file.number, start)
        self.end = start

    def remove(self) -> None:
        """Remove the file."""
        self.kept = None
        with contextlib.suppress(FileNotFoundError):  # the whole folder went first
            self.path.unlink()


# Room for the bytes of one object: one piece, or several where the last room is cut up.
Slot = tuple[Extent[Segment], ...]


def divide(views: Sequence[memoryview], nbytes: int) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
    """Return the first bytes of the views, and what is left of the views after them; none is empty."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [*views[:i], view[:nbytes]] if nbytes else views[:i], [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return views, ()


def write(slot: Slot, views: Sequence[memoryview]) -> None:
    """Write views of bytes, one after the other, none empty; each call may write less than it was given."""
    for segment, offset, nbytes in slot:
        left, views = divide(views, nbytes)
        file = segment.open()
        while left:
            done = os.pwritev(file.number, left[:_MOST_VIEWS], offset)
            left, offset = divide(left, done)[1], offset + done


def read(slot: Slot, views: Sequence[memoryview]) -> None:
    """Fill views of bytes, one after the other, none empty; OSError if the file ends before."""
    for segment, offset, nbytes in slot:
        left, views = divide(views, nbytes)
        file = segment.open()
        while left:
            done = os.preadv(file.number, left[:_MOST_VIEWS], offset)
            if not done:
                missing = sum(map(len, left))
                raise OSError(f"{segment.path} is cut off: {missing} bytes are missing at {offset}")
            left, offset = divide(left, done)[1], offset + done
