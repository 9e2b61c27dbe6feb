"""Files of the disk tier, and the room in them: reserved before data is written, used again, given back if too much."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcgpu.spill.storage.lock import LeafLock
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.worker.memory")
PAGE_BYTES = 4096
_MOST_VIEWS = 1024  # UIO_MAXIOV (linux/uio.h)
# Errors of a file system without fallocate, or without holes (fallocate(2)).
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE (linux/falloc.h)

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
SEGMENT_BYTES = 256 * 2**20
# Room that was written before is written again at 8 GB/s, new room in a file at 6, a new file of 8 MiB at 0.5 to 3.6
# (ext4, 6.18). So files grow by more than an object needs, and some free room is kept: an eighth of the room in use,
# within bounds. The kernel writes 10 % faster to files that grow to multiples of a large power of two.
_UNIT_BYTES, _MOST_KEPT_BYTES, _LAST_STEP_BYTES = 2**20, 256 * 2**20, 32 * 2**20
# To open a file again takes as long as to write 8 KiB, and releases the GIL twice; a common limit is 1024 open files.
_KEPT_OPEN = 64
# 1/128 of a limit is left for the growth of the file system's own lists of extents, which is not counted.
_UNSEEN = 128
# The number of holes made in one go: about 10 ms.
_AT_ONCE = 256


def reserve(fd: int, start: int, nbytes: int) -> None:
    """Reserve room, so that a full disk is an error now. Without fallocate only make the file longer."""
    if not _allocated(fd, 0, start, nbytes):  # glibc's posix_fallocate would write a byte to each block instead
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
    """Free room in files: extents that do not touch each other; a call takes longer only if there are many sizes."""

    def __init__(self) -> None:
        self.nbytes = 0  # of all extents; read without the lock, too
        # by first byte, and by end: no extent ends where another one starts
        self._edges: dict[Segment, dict[int, Extent]] = {}
        # the sizes in order, and by size its extents; the last one in goes out first: its pages are in the cache
        self._sizes: list[int] = []
        self._by_size: dict[int, dict[Extent, None]] = {}

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
        equals, edges = self._by_size[nbytes], self._edges[file]
        equals.pop(extent, None)
        del edges[start], edges[start + nbytes]
        if not equals:
            del self._by_size[nbytes], self._sizes[bisect_left(self._sizes, nbytes)]
        if not edges:
            del self._edges[file]
        self.nbytes -= nbytes

    def take(self, nbytes: int) -> Extent | None:
        """Take ``nbytes`` out, in one piece; None if no extent is that large."""
        number = bisect_left(self._sizes, nbytes)
        if number == len(self._sizes):
            return None
        file, start, size = self._pop(number)
        if size > nbytes:
            self._put(Extent(file, start + nbytes, size - nbytes))
        return Extent(file, start, nbytes)

    def take_large(self) -> Extent:
        """Take one of the largest extents out; there must be one."""
        return self._pop(-1)

    def _pop(self, number: int) -> Extent:
        # popitem: to find the last item otherwise takes longer after others were removed (a dict keeps their slots)
        extent, _ = self._by_size[self._sizes[number]].popitem()
        self.remove(extent)
        return extent

    def take_file(self, file: Segment) -> None:
        """Take all extents of a file out."""
        for extent in set(self._edges.get(file, {}).values()):
            self.remove(extent)

    def _put(self, extent: Extent) -> Extent:
        file, start, nbytes = extent
        if nbytes not in self._by_size:
            insort(self._sizes, nbytes)
            self._by_size[nbytes] = {}
        self._by_size[nbytes][extent] = None
        edges = self._edges.setdefault(file, {})
        edges[start] = edges[start + nbytes] = extent
        self.nbytes += nbytes
        return extent


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
    """Write (``os.pwritev``) or fill (``os.preadv``) views, one after the other, none empty; OSError: a file is cut."""
    for segment, offset, nbytes in slot:
        left, views = divide(views, nbytes)
        file = segment.open()
        while left:  # each call may write or read less than it was given
            done = call(file.number, left[:_MOST_VIEWS], offset)
            if not done:
                missing = sum(map(len, left))
                raise OSError(f"{segment.path} is cut off: {missing} bytes are missing at {offset}")
            left, offset = divide(left, done)[1], offset + done


def room_for(nbytes: int) -> int:
    """Return the room for ``nbytes``: whole pages, at most a sixteenth more than the bytes."""
    step = min(max(1 << max(nbytes.bit_length() - 5, 0), PAGE_BYTES), 16 * PAGE_BYTES)
    # the page cache has larger pages, too: arrays of 256 KiB are written 7 % slower if they begin anywhere
    return -(-nbytes // step) * step


class Segments:
    """Room in the files of a folder; any thread takes it and gives it back.

    Disk makes it; only the spill thread trims and closes it. Its lock is a leaf, but files are opened, made longer and
    cut under it: so no thread cuts a file, or checks its length, while another one makes it longer. Holes are made, and
    empty files removed, without the lock.

    Free room is used again, even in small pieces. If more is free than an eighth of the room in use, :meth:`trim` gives
    it back to the file system, as holes in the files. A file system without holes gets room back from the ends of the
    files, at once. An empty file is removed. An object larger than half a segment has a file of its own. Files take
    ``most_bytes`` at most together; 0: no limit but the disk's.
    """

    def __init__(self, folder: Path, reserve: Callable[[int, int, int], None] = reserve, most_bytes: int = 0) -> None:
        self._folder, self._reserve, self._most_bytes = folder, reserve, most_bytes
        # of held_bytes; 0: no limit
        self.limit_bytes = most_bytes and max((most_bytes - most_bytes // _UNSEEN) // PAGE_BYTES * PAGE_BYTES, 1)
        self.used_bytes = self.held_bytes = 0  # the room in use; the bytes of the files on the file system
        self._idle = Extents()
        self._numbers = itertools.count()
        self._growing: Segment | None = None
        self._open: dict[Segment, None] = {}  # oldest first
        self._stuck: list[Segment] = []  # empty, but could not be removed
        self._knows_holes = True
        self._lock = LeafLock()

    @property
    def kept_bytes(self) -> int:
        """The free room that is kept, at most."""
        used = self.used_bytes
        return used and min(max(used // 8, _UNIT_BYTES), _MOST_KEPT_BYTES)

    @property
    def has_excess(self) -> bool:
        """True if more room is free than is kept, and can be given back."""
        return self._knows_holes and self._idle.nbytes > self.kept_bytes

    def take(self, nbytes: int) -> Room:
        """Return room for ``nbytes``; OSError if the disk is full, or the limit is reached."""
        size = missing = room_for(nbytes)
        taken: list[Extent] = []
        with self._lock:
            try:
                while missing:
                    taken.append(piece := self._piece(missing))
                    missing -= piece.nbytes
            except BaseException:
                for piece in taken:
                    self._idle.add(piece)
                raise
            for piece in taken:
                piece.file.used_bytes += piece.nbytes
            self.used_bytes += size
        return tuple(taken)

    def _piece(self, nbytes: int) -> Extent:
        """Return a piece of ``nbytes``, or a smaller one if only small pieces are left."""
        while True:
            piece = self._idle.take(nbytes)
            if piece is None:
                # small pieces that cannot be given back are used first, others only if there is no other room
                if self._knows_holes or self._idle.nbytes <= self.kept_bytes:
                    try:
                        return self._reserved(nbytes)
                    except OSError:
                        if not self._idle.nbytes:
                            raise
                piece = self._idle.take_large()
            try:
                piece.file.whole()
            except OSError:
                self._shut(piece.file)
            else:
                return piece

    def _reserved(self, nbytes: int) -> Extent:
        """Return a piece of new room."""
        if self.limit_bytes and self.held_bytes + nbytes + PAGE_BYTES > self.limit_bytes:
            most = format_bytes(self._most_bytes)
            raise OSError(errno.EDQUOT, f"the files would exceed {most} (distributed.worker.memory.max-spill)")
        if (segment := self._growing) and segment.end + nbytes <= SEGMENT_BYTES:
            # it fails by EFBIG of a limit, or since the file was cut: a new file may succeed
            with contextlib.suppress(OSError):
                return self._grown(segment, nbytes)
        segment = Segment(self._folder / str(next(self._numbers)))
        self.held_bytes += segment.held_bytes
        try:
            piece = self._grown(segment, nbytes)
        except BaseException:
            self.held_bytes -= segment.held_bytes
            segment.remove()
            raise
        self._open[segment] = None
        if len(self._open) > _KEPT_OPEN:
            self._open.pop(oldest := next(iter(self._open)))
            oldest.kept = None
        if nbytes <= SEGMENT_BYTES // 2:
            self._growing = segment
        return piece

    def _grown(self, segment: Segment, nbytes: int) -> Extent:
        """Make a file longer, by at least ``nbytes``; the rest is free."""
        file, start = segment.whole(), segment.end
        large = nbytes
        if nbytes <= SEGMENT_BYTES // 2:
            units = -(-max(min(self.kept_bytes, _LAST_STEP_BYTES), nbytes) // _UNIT_BYTES)
            left = self.limit_bytes - self.held_bytes if self.limit_bytes else SEGMENT_BYTES
            large = max(min(units * _UNIT_BYTES, SEGMENT_BYTES - start, left), nbytes)
        try:
            self._reserve(file.number, start, large)
        except OSError:
            segment.cut(start)  # some of the room may have been reserved
            if large == nbytes:
                raise
            large = nbytes  # the last room of a nearly full disk
            self._reserve(file.number, start, large)
        segment.end += large
        self._hold(segment, large)
        if large > nbytes:
            self._idle.add(Extent(segment, start + nbytes, large - nbytes))
        return Extent(segment, start, nbytes)

    def _hold(self, segment: Segment, nbytes: int) -> None:
        segment.held_bytes += nbytes
        self.held_bytes += nbytes

    def _shut(self, segment: Segment) -> None:
        """Use the free room of a file no more."""
        self._idle.take_file(segment)
        segment.is_shut = True
        if segment is self._growing:
            self._growing = None

    def give_back(self, slots: Iterable[Room]) -> None:
        """Make room usable again, or remove its file; no thread reads or writes there any more."""
        with self._lock:  # a file that cannot be removed (a stale handle of NFS) is tried again each time
            empty, self._stuck = self._stuck, []
        for slot in slots:
            with self._lock:  # for each slot: a million may come at once
                for piece in slot:
                    self._give_back(piece, empty)
        for segment in empty:
            is_removed = segment.remove()  # takes milliseconds, and no writer waits for it
            with self._lock:
                if is_removed:
                    self._hold(segment, -segment.held_bytes)
                else:
                    self._stuck.append(segment)

    def _give_back(self, piece: Extent, empty: list[Segment]) -> None:
        segment = piece.file
        segment.used_bytes -= piece.nbytes
        self.used_bytes -= piece.nbytes
        if not segment.used_bytes:
            self._shut(segment)
            self._open.pop(segment, None)
            empty.append(segment)
        elif not segment.is_shut:
            self._free(piece)

    def _free(self, piece: Extent) -> None:
        merged = self._idle.add(piece)
        segment, start, nbytes = merged
        if not self._knows_holes and start + nbytes == segment.end:
            with contextlib.suppress(OSError):
                segment.cut(start)
                self._idle.remove(merged)
                self._hold(segment, -nbytes)

    def trim(self) -> None:
        """Give back some of the excess; call it again while :attr:`has_excess`."""
        enough = self.kept_bytes // 2 if self.has_excess else self._idle.nbytes  # not a hole for each object
        for _ in range(_AT_ONCE):
            with self._lock:
                if self._idle.nbytes <= enough:
                    return
                piece = self._idle.take_large()
            self._make_hole(piece)

    def _make_hole(self, piece: Extent) -> None:
        segment, start, nbytes = piece
        try:
            hole = segment.hole(start, nbytes)  # takes milliseconds, and no writer waits for it
        except OSError as e:
            if not segment.is_shut:
                with self._lock:
                    self._shut(segment)
                why = str(e)  # a log handler that keeps records would keep the error's frames, with the open file
                logger.warning("room in %s cannot be given back before all of it is free: %s", segment.path, why)
            return
        with self._lock:
            self._knows_holes = hole is not None
            if hole is None and not segment.is_shut:
                self._free(piece)
            elif hole is not None and segment.held_bytes:  # else the file was removed meanwhile
                self._hold(segment, segment.growth(hole, nbytes))

    def close(self) -> None:
        """Close the files; the owner of the folder removes it."""
        with self._lock:
            for segment in self._open:
                segment.kept = None
            self._open.clear()
