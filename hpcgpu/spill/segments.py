"""Room in files: segments, each cut into slots of one size, reserved before they are written to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcgpu.units import format_bytes

_PAGE_BYTES = 4096
SEGMENT_BYTES = 256 * 2**20
# Rewriting room that was written before: 8 GB/s; new room in a file: 6; a new file of 8 MiB: 0.5 to 3.6 (ext4, 6.18).
_FIRST_STEP_BYTES, _LAST_STEP_BYTES = 2**20, 32 * 2**20
# Opening a file anew takes as long as writing 8 KiB, and gives the GIL away twice; but 1024 files is a common limit.
_KEPT_OPEN = 64
_MOST_VIEWS = 1024  # UIO_MAXIOV (linux/uio.h)
# What a file system says that knows no fallocate (fallocate(2)).
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def round_up(nbytes: int) -> int:
    """Return the size of the slot for so many bytes: whole pages, eight sizes from one power of two to the next."""
    step = max(_PAGE_BYTES, 1 << max((nbytes - 1).bit_length() - 4, 0))
    return -(-nbytes // step) * step


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Have a full disk say so now; where that cannot be, only make the file longer.

    Not posix_fallocate: where the file system has none, glibc writes a byte to each block.
    """
    while _fallocate(fd, 0, start, nbytes):
        code = ctypes.get_errno()
        if code in _NO_FALLOCATE:
            os.ftruncate(fd, start + nbytes)
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Descriptor:
    """A file descriptor that is closed when nobody uses it any more: also by who reads while the store is closed."""

    __slots__ = ("number",)

    def __init__(self, path: Path, flags: int = 0) -> None:
        self.number = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


class Segment:
    """A file of slots of one size."""

    def __init__(self, path: Path, slot_bytes: int, *, keep_open: bool) -> None:
        self.path, self.slot_bytes = path, slot_bytes
        self.most = max(SEGMENT_BYTES // slot_bytes, 1)
        self.used = self.touched = self.reserved_bytes = 0
        self.free: list[int] = []
        made = Descriptor(path, os.O_CREAT | os.O_EXCL)
        self.kept = made if keep_open else None

    @property
    def has_room(self) -> bool:
        """Whether a slot can be taken, if the disk has room."""
        return bool(self.free) or self.touched < self.most

    def open(self) -> Descriptor:
        """Return the file, to read and to write."""
        return self.kept or Descriptor(self.path)

    def take(self, reserve: Callable[[int, int, int], None]) -> int:
        """Return the offset of a slot; OSError if there is no room, or if somebody cut the file off."""
        file = self.open()
        # a write behind the end of a file that was cut would turn what is lost into zeros
        if (there := os.fstat(file.number).st_size) < self.reserved_bytes:
            raise OSError(f"{self.path} is cut off: {there} of {self.reserved_bytes} bytes are left")
        if not self.free:
            self._grow(file.number, reserve)
            self.free.append(self.touched * self.slot_bytes)
            self.touched += 1
        self.used += 1
        return self.free.pop()

    def _grow(self, fd: int, reserve: Callable[[int, int, int], None]) -> None:
        start, end = self.reserved_bytes, (self.touched + 1) * self.slot_bytes
        if start >= end:
            return
        step = min(max(start, _FIRST_STEP_BYTES), _LAST_STEP_BYTES)
        large = min(max(start + step, end), self.most * self.slot_bytes)
        try:
            reserve(fd, start, large - start)
        except OSError:
            if large == end:
                raise
            large = end  # the last room of a disk that is nearly full
            reserve(fd, start, large - start)
        self.reserved_bytes = large

    def remove(self) -> None:
        """Remove the file."""
        self.kept = None
        with contextlib.suppress(FileNotFoundError):  # the whole folder went first
            self.path.unlink()


class Slot(NamedTuple):
    """Room for the bytes of one object."""

    segment: Segment
    offset: int


class Segments:
    """The segments in a folder; slots are taken and given back by any thread.

    A segment that is empty is removed. What is larger than half a segment has a file of its own.

    Parameters
    ----------
    folder : Path
        Where the files are.
    reserve : callable
        Called with file descriptor, start and size of what a file is to be made longer by; OSError if the disk is full.
    limit_bytes : int
        Slots may have so much together; 0: what the disk has.

    """

    def __init__(self, folder: Path, reserve: Callable[[int, int, int], None] = reserve, limit_bytes: int = 0) -> None:
        self._folder, self._reserve, self._limit_bytes = folder, reserve, limit_bytes
        self._taken_bytes = 0
        self._numbers = itertools.count()
        self._kept = set[Segment]()
        # by size of the slots; a dict, since it is ordered: the oldest ones are filled up, so that others get empty
        self._with_room: dict[int, dict[Segment, None]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Slot:
        """Return room for so many bytes; OSError if the disk is full, or as full as it may be."""
        size = round_up(nbytes)
        with self._lock:
            if 0 < self._limit_bytes < self._taken_bytes + size:
                most = format_bytes(self._limit_bytes)
                raise OSError(errno.EDQUOT, f"no more than {most} may lie there (distributed.worker.memory.max-spill)")
            slot = self._take(size)
            self._taken_bytes += size
            return slot

    def _take(self, size: int) -> Slot:
        room = self._with_room.setdefault(size, {})
        while (segment := next(iter(room), None)) is not None:
            try:
                offset = segment.take(self._reserve)
            except OSError:  # ENOSPC, EFBIG of a limit, a cut file: the next one, or a new one, may do
                del room[segment]
                continue
            if not segment.has_room:
                del room[segment]
            return Slot(segment, offset)
        return self._take_of_new(size, room)

    def _take_of_new(self, size: int, room: dict[Segment, None]) -> Slot:
        segment = Segment(self._folder / str(next(self._numbers)), size, keep_open=len(self._kept) < _KEPT_OPEN)
        try:
            offset = segment.take(self._reserve)
        except BaseException:
            segment.remove()
            raise
        if segment.kept:
            self._kept.add(segment)
        if segment.has_room:
            room[segment] = None
        return Slot(segment, offset)

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Let the room be used again, or remove the file; nobody reads or writes there any more."""
        empty = []
        with self._lock:
            for segment, offset in slots:
                segment.free.append(offset)
                segment.used -= 1
                self._taken_bytes -= segment.slot_bytes
                room = self._with_room[segment.slot_bytes]
                room.setdefault(segment)
                if not segment.used:
                    del room[segment]
                    self._kept.discard(segment)
                    empty.append(segment)
        for segment in empty:
            segment.remove()  # milliseconds for a large one: no writer waits for it

    def close(self) -> None:
        """Let go of the files; the folder is removed by whoever made it."""
        with self._lock:
            for segment in self._kept:
                segment.kept = None
            self._kept.clear()


def advance(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return what is left of the views after their first bytes."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def write(slot: Slot, views: Sequence[memoryview]) -> None:
    """Write views of bytes, one after the other; each call may write less than it was given."""
    offset, left = slot.offset, advance(views, 0)
    file = slot.segment.open()
    while left:
        done = os.pwritev(file.number, left[:_MOST_VIEWS], offset)
        left, offset = advance(left, done), offset + done


def read(slot: Slot, views: Sequence[memoryview]) -> None:
    """Fill views of bytes, one after the other; OSError if the file ends before."""
    offset, left = slot.offset, advance(views, 0)
    file = slot.segment.open()
    while left:
        done = os.preadv(file.number, left[:_MOST_VIEWS], offset)
        if not done:
            missing = sum(map(len, left))
            raise OSError(f"{slot.segment.path} is cut off: {missing} bytes are missing at {offset}")
        left, offset = advance(left, done), offset + done
