"""Files of the disk tier: made longer, written and read in pieces; and the free room in them."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("distributed.worker.memory")
PAGE_BYTES = 4096
_MOST_VIEWS = 1024  # UIO_MAXIOV (linux/uio.h)
# Errors of a file system without fallocate, or without holes (fallocate(2)).
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE (linux/falloc.h)

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Reserve room, so that a full disk is an error now. Without fallocate only make the file longer."""
    # not posix_fallocate: if the file system has no fallocate, glibc writes a byte to each block
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
    """An open file, for any thread (only with offsets: threads share its position), until its last reference goes."""

    __slots__ = ("number",)

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Segment:
    """A file of the disk tier. Any thread may read, write and make holes; Segments changes the rest under its lock."""

    # but the thread that removes the file sets ``kept`` and ``is_stuck`` without the lock

    __slots__ = ("_list_bytes", "end", "held_bytes", "is_shut", "is_stuck", "kept", "path", "used_bytes")

    def __init__(self, path: Path) -> None:
        self.path, self.end, self.used_bytes = path, 0, 0  # the end of the reserved room; the room in use
        self.held_bytes = self._list_bytes = PAGE_BYTES  # on the file system, with its list of the file's extents
        self.is_shut = False  # its free room is not used: it will be removed, or is damaged
        self.is_stuck = False  # it could not be removed
        self.kept: Descriptor | None = Descriptor(path, os.O_CREAT | os.O_EXCL)  # None: it is not kept open

    def open(self) -> Descriptor:
        """Return the file, open to read and write."""
        return self.kept or Descriptor(self.path)

    def whole(self) -> Descriptor:
        """Return the file; OSError if it was cut."""
        file = self.open()
        # a write behind the end of a file that was cut would turn the lost bytes into zeros
        if (size := os.fstat(file.number).st_size) < self.end:
            raise OSError(f"{self.path} is cut off: {size} of {self.end} bytes are left")
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

    def remove(self) -> bool:
        """Remove the file; return whether that succeeded."""
        self.kept = None
        try:
            self.path.unlink(missing_ok=True)  # the whole folder may have gone first
        except OSError as e:
            if not self.is_stuck:
                self.is_stuck = True
                logger.warning("a file without data cannot be removed; hpcgpu will try again: %s", e)
            return False
        return True


class Extent(NamedTuple):
    """Whole pages of a file, from byte ``start`` on."""

    file: Segment
    start: int
    nbytes: int


class Extents:
    """Free room in files: extents that do not touch each other; no call takes longer if there are many."""

    def __init__(self) -> None:
        self.nbytes = 0  # of all extents; read without the lock, too
        # by first byte, and by end: no extent ends where another one starts
        self._edges: dict[Segment, dict[int, Extent]] = {}
        # by size; the last one in goes out first: its pages are in the cache
        self._bins: dict[int, dict[Extent, None]] = {}
        self._filled = 0  # the bins that are not empty, as bits

    def add(self, extent: Extent) -> Extent:
        """Add an extent; return it, merged with its neighbours."""
        file, start, nbytes = extent
        edges = self._edges.get(file, {})
        if (before := edges.get(start)) is not None:
            self.remove(before)
            start, nbytes = before.start, before.nbytes + nbytes
        if (behind := edges.get(start + nbytes)) is not None:
            self.remove(behind)
            nbytes += behind.nbytes
        return self._put(Extent(file, start, nbytes))

    def remove(self, extent: Extent) -> None:
        """Take an extent out."""
        file, start, nbytes = extent
        number = _bin_of(nbytes)
        bin_, edges = self._bins[number], self._edges[file]
        bin_.pop(extent, None)
        del edges[start], edges[start + nbytes]
        if not bin_:
            self._filled ^= 1 << number
        if not edges:
            del self._edges[file]
        self.nbytes -= nbytes

    def take(self, nbytes: int) -> Extent | None:
        """Take ``nbytes`` out, in one piece; None if no extent is that large."""
        number = _bin_of(nbytes)
        # popitem: to find the last item otherwise takes longer after others were removed (a dict keeps their slots)
        extent = self._bins[number].popitem()[0] if self._filled >> number & 1 else None
        if extent is None or extent.nbytes < nbytes:
            if extent is not None:
                self._bins[number][extent] = None
            larger = self._filled >> number + 1
            if not larger:
                return None
            number += (larger & -larger).bit_length()
            extent = self._bins[number].popitem()[0]
        file, start, size = extent
        if size > nbytes and _bin_of(size - nbytes) == number:  # as each time when a file was made longer
            bin_, edges = self._bins[number], self._edges[file]
            del edges[start]
            rest = Extent(file, start + nbytes, size - nbytes)
            bin_[rest], edges[start + nbytes], edges[start + size] = None, rest, rest
            self.nbytes -= nbytes
        else:
            self.remove(extent)
            if size > nbytes:
                self._put(Extent(file, start + nbytes, size - nbytes))
        return Extent(file, start, nbytes)

    def take_large(self) -> Extent:
        """Take one of the largest extents out; there must be one."""
        extent = self._bins[self._filled.bit_length() - 1].popitem()[0]
        self.remove(extent)
        return extent

    def take_file(self, file: Segment) -> None:
        """Take all extents of a file out."""
        for extent in set(self._edges.get(file, {}).values()):
            self.remove(extent)

    def _put(self, extent: Extent) -> Extent:
        file, start, nbytes = extent
        number = _bin_of(nbytes)
        self._bins.setdefault(number, {})[extent] = None
        self._filled |= 1 << number
        edges = self._edges.setdefault(file, {})
        edges[start] = edges[start + nbytes] = extent
        self.nbytes += nbytes
        return extent


def _bin_of(nbytes: int) -> int:
    """Return the number of an extent's bin: one bin for each size up to 15 pages, then eight for each power of two."""
    pages = nbytes // PAGE_BYTES
    step = max(pages.bit_length() - 4, 0)
    return (step << 3) + (pages >> step)


# The room of one object: one extent, or several if only small ones are left.
Room = tuple[Extent, ...]


def divide(views: Sequence[memoryview], nbytes: int) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
    """Return views of the first bytes, and views of the bytes after them; no view is empty."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [*views[:i], view[:nbytes]] if nbytes else views[:i], [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return views, ()


def transfer(slot: Room, views: Sequence[memoryview], call: Callable[[int, Sequence[memoryview], int], int]) -> None:
    """Write (``os.pwritev``) or fill (``os.preadv``) views of bytes, one after the other, none empty."""
    # each call may write or read less than it was given; OSError if the file is too short to be read
    for segment, offset, nbytes in slot:
        left, views = divide(views, nbytes)
        file = segment.open()
        while left:
            done = call(file.number, left[:_MOST_VIEWS], offset)
            if not done:
                missing = sum(map(len, left))
                raise OSError(f"{segment.path} is cut off: {missing} bytes are missing at {offset}")
            left, offset = divide(left, done)[1], offset + done
