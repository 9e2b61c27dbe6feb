"""Room in files: reserved before data is written to it, used again, and given back if too much of it is free."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from hpcgpu.spill.storage.buffer_pool import LeafLock
from hpcgpu.spill.storage.segment import PAGE_BYTES, Extent, Extents, Room, Segment, reserve
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.worker.memory")

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


def room_for(nbytes: int) -> int:
    """Return the room for ``nbytes``: whole pages, at most a sixteenth more than the bytes."""
    # the page cache has larger pages, too: arrays of 256 KiB are written 7 % slower if they begin anywhere
    step = min(max(1 << max(nbytes.bit_length() - 5, 0), PAGE_BYTES), 16 * PAGE_BYTES)
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
        # a file that cannot be removed (a stale handle of NFS) is tried again the next time
        with self._lock:
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
        error, hole, is_shut = "", None, False
        try:
            hole = segment.hole(start, nbytes)  # takes milliseconds, and no writer waits for it
        except OSError as e:
            error = str(e)
        with self._lock:
            if hole is not None:
                if segment.held_bytes:  # else the file was removed meanwhile
                    self._hold(segment, segment.growth(hole, nbytes))
            elif not segment.is_shut:
                if not error:
                    self._knows_holes = False
                    self._free(piece)
                else:
                    self._shut(segment)
                    is_shut = True
        if is_shut:
            logger.warning("room in %s cannot be given back before all of it is free: %s", segment.path, error)

    def close(self) -> None:
        """Close the files; the owner of the folder removes it."""
        with self._lock:
            for segment in self._open:
                segment.kept = None
            self._open.clear()
