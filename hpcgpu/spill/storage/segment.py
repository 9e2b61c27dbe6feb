"""A file of the disk tier: made longer, written and read in pieces, with holes where the room is given back."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from hpcgpu.spill.storage.extents import PAGE_BYTES, Extent

_MOST_VIEWS = 1024  # UIO_MAXIOV (linux/uio.h)
# Errors of a file system that has no fallocate, or none that makes holes (fallocate(2)).
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE (linux/falloc.h)

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Reserve room, so that a full disk is an error now. Without fallocate only make the file longer.

    Not posix_fallocate: if the file system has no fallocate, glibc writes a byte to each block.
    """
    if not _allocated(fd, 0, start, nbytes):
        os.ftruncate(fd, start + nbytes)


def _allocated(fd: int, mode: int, start: int, nbytes: int) -> bool:
    """Call fallocate; return whether the file system has it."""
    while _fallocate(fd, mode, start, nbytes):
        code = ctypes.get_errno()
        if code in _NO_FALLOCATE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


class Descriptor:
    """A file descriptor, closed when its last reference goes: a thread that reads may outlive the store.

    Immutable; Segment makes it. Any thread may use its ``number``, with offsets only: threads share its position.
    """

    __slots__ = ("number",)

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Segment:
    """A file.

    Segments makes it, and changes it under its own lock; but the thread that removes the file sets ``kept`` and
    ``is_stuck`` without the lock. Any thread may read, write and make holes without the lock. All sizes are in bytes.

    Attributes
    ----------
    end : int
        The end of the room that was reserved.
    used_bytes, held_bytes : int
        The room in use; and what the file takes on the file system, with the file system's list of its extents.
    is_shut : bool
        Its free room is not used any more: it will be removed, or something is wrong with it.
    is_stuck : bool
        It could not be removed.
    kept : Descriptor or None
        The file, if it is kept open.

    """

    __slots__ = ("_list_bytes", "end", "held_bytes", "is_shut", "is_stuck", "kept", "path", "used_bytes")

    def __init__(self, path: Path) -> None:
        self.path, self.end, self.used_bytes = path, 0, 0
        self.held_bytes = self._list_bytes = PAGE_BYTES
        self.is_shut = self.is_stuck = False
        self.kept: Descriptor | None = Descriptor(path, os.O_CREAT | os.O_EXCL)

    def open(self) -> Descriptor:
        """Return the file, open to read and write."""
        return self.kept or Descriptor(self.path)

    def whole(self) -> Descriptor:
        """Return the file; OSError if somebody cut it."""
        file = self.open()
        # a write behind the end of a file that was cut would turn the lost bytes into zeros
        if (there := os.fstat(file.number).st_size) < self.end:
            raise OSError(f"{self.path} is cut off: {there} of {self.end} bytes are left")
        return file

    def hole(self, start: int, nbytes: int) -> Descriptor | None:
        """Give room back to the file system; return the file, or None if the file system makes no holes."""
        file = self.open()
        return file if _allocated(file.number, _HOLE, start, nbytes) else None

    def growth(self, hole: Descriptor, nbytes: int) -> int:
        """Return the change of ``held_bytes`` by a new hole of so many bytes: the list of extents gets longer."""
        before, room_bytes = self._list_bytes, self.held_bytes - self._list_bytes - nbytes
        self._list_bytes = max(os.fstat(hole.number).st_blocks * 512 - room_bytes, PAGE_BYTES)
        return self._list_bytes - before - nbytes

    def cut(self, start: int) -> None:
        """Give all room back from here on."""
        file = self.open()
        os.ftruncate(file.number, start)
        self.end = start

    def remove(self) -> None:
        """Remove the file."""
        self.kept = None
        with contextlib.suppress(FileNotFoundError):  # the whole folder went first
            self.path.unlink()


# The room of one object: one piece, or several if only small pieces are left.
Room = tuple[Extent[Segment], ...]


def divide(views: Sequence[memoryview], nbytes: int) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
    """Return views of the first bytes, and views of the bytes after them; no view is empty."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [*views[:i], view[:nbytes]] if nbytes else views[:i], [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return views, ()


def write(slot: Room, views: Sequence[memoryview]) -> None:
    """Write views of bytes, one after the other, none empty; each call may write less than it was given."""
    for segment, offset, nbytes in slot:
        left, views = divide(views, nbytes)
        file = segment.open()
        while left:
            done = os.pwritev(file.number, left[:_MOST_VIEWS], offset)
            left, offset = divide(left, done)[1], offset + done


def read(slot: Room, views: Sequence[memoryview]) -> None:
    """Fill views of bytes, one after the other, none empty; OSError if the file is too short."""
    for segment, offset, nbytes in slot:
        left, views = divide(views, nbytes)
        file = segment.open()
        while left:
            done = os.preadv(file.number, left[:_MOST_VIEWS], offset)
            if not done:
                missing = sum(map(len, left))
                raise OSError(f"{segment.path} is cut off: {missing} bytes are missing at {offset}")
            left, offset = divide(left, done)[1], offset + done
