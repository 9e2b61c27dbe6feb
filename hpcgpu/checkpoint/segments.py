"""Segments: files of chunks, only ever appended to, which open after a crash at any byte.

A segment is a row of records. A record is a head, a text, frames and a checksum of the frames. The head has the text's
and the frames' length and a checksum of the text; the text, JSON, names the chunk. A head without a text is a mark:
everything before it is synced. Chunks after the last mark count only if their frames have the right checksum.

The disk writes while more comes: the kernel would begin only at a sync, and the sync of 64 MiB would then take longer
than to compute the checksums of the next ones. Measured on ext4 with dd conv=fsync at 1.7 GiB/s: 0.7 GiB/s with a sync
each 64 MiB, 1.5 with ``sync_file_range`` behind each 8 MiB. The checksum is behind the frames for the same reason. Two
threads, one of which syncs, were not faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcgpu.errors import CheckpointError
from hpcgpu.host import private
from hpcgpu.spill.storage.segments import divide

SEGMENT, OWNER = ".segment", "owner"  # names of files
SEGMENT_BYTES = 1 << 30
_MAGIC = b"hgc2"
# magic, CRC-32 of what follows and of the text, bytes of the text, bytes of the frames
_HEAD = struct.Struct("<4sIIQ")
_MOST_TEXT_BYTES = 1 << 24
_CRC = struct.Struct("<I")
_PIECE_BYTES = 1 << 23
_MOST_VIEWS = 1024  # UIO_MAXIOV (linux/uio.h)
# The disk may be so far behind: more would be dirty pages, which count as memory of the job. What is on the disk leaves
# the page cache: the next piece takes the same pages, and tasks get back those that they have freed. CPU s per GiB on a
# busy virtual machine, medians of 7 and 9 turns with and without: to write 0.76 in place of 1.60; page faults of new
# arrays in another thread 0.21, as if nothing was written, in place of 0.36.
_BEHIND_BYTES = 4 * _PIECE_BYTES
_WRITE, _WAIT = 0x2, 0x1 | 0x2 | 0x4  # flags of sync_file_range(2)
sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_CHECKED = 8  # the offset of the first byte that the head's checksum covers


class Chunk(NamedTuple):
    """A chunk: the computation that it is a part of, and its place in it."""

    run: str  # a random name of the computation, new when it is overwritten
    part: tuple[Any, ...]


class Place(NamedTuple):
    """Where a record lies."""

    segment: str
    offset: int
    nbytes: int  # of the frames


class Record(NamedTuple):
    """A record's text, and the first byte of its frames."""

    chunk: Chunk
    sizes: list[int]  # bytes of each frame
    frames_offset: int


class SegmentWriter:
    """The segments of one worker, for one thread. After a failed call nothing of its record is in the file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stem, self._number = folder, secrets.token_hex(6), 0
        self._file = -1
        self._end = self._begun = 0  # of the last complete record; of what the disk has begun to write
        self._error: OSError | None = None  # of the disk, that the next sync has to raise: no other call would again

    def append(self, chunk: Chunk, frames: Sequence[memoryview]) -> int:
        """Write a record; return the bytes of its frames; OSError if there is no room."""
        if self._end >= SEGMENT_BYTES:
            try:
                self.sync()
            except OSError as e:
                self._error = e
                raise
            self.close()
        if self._file < 0:
            self._open()
        sizes = [frame.nbytes for frame in frames]
        text = json.dumps({"run": chunk.run, "part": chunk.part, "sizes": sizes}).encode()
        self._write([memoryview(_head(text, sum(sizes)) + text)], frames)
        return sum(sizes)

    def sync(self) -> None:
        """Bring all records to the disk, and mark them as synced; after an OSError none since the last sync counts."""
        error, self._error = self._error, None
        if self._file < 0 and error is None:
            return
        try:
            if error:
                raise error
            os.fsync(self._file)
            is_removed = not os.fstat(self._file).st_nlink  # by another owner, with all names that it had chunks of
        except OSError:  # the kernel may have dropped the pages, and a second fsync would not say so
            self.close()
            raise
        if is_removed:
            self.close()
            raise OSError(errno.ESTALE, "the segment was removed")
        with contextlib.suppress(OSError):  # without the mark their checksums are read
            self._write([memoryview(_head(b"", 0))])

    def close(self) -> None:
        """Close the segment; the next record begins a new one."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        path = self._folder / f"{self._stem}-{self._number}{SEGMENT}"
        self._number += 1
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._end = self._begun = 0
        sync_folder(self._folder)

    def _write(self, head: list[memoryview], frames: Sequence[memoryview] | None = None) -> None:
        """Write a head, and frames with their checksum, in pieces."""
        try:
            crc, views, nbytes = 0, head, 0
            for frame in frames or ():
                for start in range(0, frame.nbytes, _PIECE_BYTES):
                    views.append(piece := frame.cast("B")[start : start + _PIECE_BYTES])
                    crc, nbytes = zlib.crc32(piece, crc), nbytes + piece.nbytes
                    if nbytes >= _PIECE_BYTES:
                        self._write_piece(views)
                        views, nbytes = [], 0
            self._write_piece(views if frames is None else [*views, memoryview(_CRC.pack(crc))])
        except OSError:
            try:
                os.ftruncate(self._file, self._end)
                os.lseek(self._file, self._end, os.SEEK_SET)
                self._begun = min(self._begun, self._end)
            except OSError as e:  # a file server that is away; a reader goes on behind the torn record
                self._error = e
                self.close()
            raise
        self._end = os.lseek(self._file, 0, os.SEEK_CUR)

    def _write_piece(self, views: Sequence[memoryview]) -> None:
        """Write views, none empty; let the disk begin, and wait for it if it is far behind."""
        while views:
            views = divide(views, os.writev(self._file, views[:_MOST_VIEWS]))[1]
        end = os.lseek(self._file, 0, os.SEEK_CUR)
        while end - self._begun >= _PIECE_BYTES:
            try:
                to_disk(self._file, self._begun, _WRITE)
                if (behind := self._begun - _BEHIND_BYTES) >= 0:
                    to_disk(self._file, behind, _WAIT)
                    os.posix_fadvise(self._file, behind, _PIECE_BYTES, os.POSIX_FADV_DONTNEED)
            except OSError as e:
                self._error = e
                raise
            self._begun += _PIECE_BYTES


class Index:
    """The chunks in a folder's segments. :meth:`refresh` reads what came since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.chunks: dict[Chunk, Place] = {}
        self.unsure: dict[Chunk, Place] = {}  # whole, but not marked as synced
        self.damage: dict[str, int] = {}  # segments, and an offset from which bytes of it cannot be read; by check()
        self._ends: dict[str, int] = {}

    def refresh(self, *, behind_damage: bool = False) -> None:
        """Read new records of all segments; ``behind_damage``: look for records there, too."""
        names = {path.name for path in private.files_in(self._folder) if path.name.endswith(SEGMENT)}
        if gone := self._ends.keys() - names:
            self._ends = {name: end for name, end in self._ends.items() if name not in gone}
            self.damage = {name: offset for name, offset in self.damage.items() if name not in gone}
            for places in (self.chunks, self.unsure):
                for chunk in [chunk for chunk, place in places.items() if place.segment in gone]:
                    del places[chunk]
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError), (self._folder / name).open("rb", buffering=0) as file:
                self._scan(name, file.fileno(), behind_damage)

    def check(self) -> None:
        """Read the frames of chunks without a mark, also behind damage; take those that are whole."""
        self.refresh(behind_damage=True)
        for chunk, place in self.unsure.items():
            if is_whole(self._folder, chunk, place):
                self.chunks[chunk] = place
        self.unsure = {}

    def _scan(self, name: str, file: int, behind_damage: bool) -> None:
        size, offset = os.fstat(file).st_size, self._ends.get(name, 0)
        while size - offset >= _HEAD.size:
            try:
                record, end = _read(file, os.pread(file, _HEAD.size, offset), offset)
            except CheckpointError:
                record, end = None, 0
            if not offset < end <= size:  # damaged; or being written, or torn by a crash
                later = _next_record(file, offset + 1, size) if behind_damage else None
                if behind_damage and (later or not end):
                    self.damage[name] = offset
                if later is None:
                    break
                offset = later
                continue
            if record is None:
                marked = [chunk for chunk, place in self.unsure.items() if place.segment == name]
                self.chunks |= {chunk: self.unsure.pop(chunk) for chunk in marked}
            else:
                self.unsure[record.chunk] = Place(name, offset, sum(record.sizes))
            offset = self._ends[name] = end


def read(folder: Path, chunk: Chunk, place: Place) -> list[Any]:
    """Read a chunk's frames as arrays of uint8; CheckpointError, with the chunk's file, if they are not as written."""
    import numpy as np

    with _opened(folder, chunk, place) as (file, record):
        frames = [np.empty(size, np.uint8) for size in record.sizes]
        offset, crc = record.frames_offset, 0
        for frame in frames:
            for start in range(0, frame.nbytes, _PIECE_BYTES):
                piece = frame[start : start + _PIECE_BYTES].data
                while piece.nbytes:
                    if not (count := os.preadv(file, [piece], offset)):
                        raise _damaged(folder, place, "it ends too early")
                    crc, offset, piece = zlib.crc32(piece[:count], crc), offset + count, piece[count:]
        if crc != _crc(file, offset):
            raise _damaged(folder, place, "its checksum is another one")
        return frames


def is_whole(folder: Path, chunk: Chunk, place: Place) -> bool:
    """Return whether a chunk's frames are as they were written; reads them piece by piece."""
    try:
        with _opened(folder, chunk, place) as (file, record):
            left, offset, crc = place.nbytes, record.frames_offset, 0
            while left and (piece := os.pread(file, min(left, _PIECE_BYTES), offset)):
                left, offset, crc = left - len(piece), offset + len(piece), zlib.crc32(piece, crc)
            return not left and crc == _crc(file, offset)
    except (CheckpointError, OSError):
        return False


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot, and need not
            os.fsync(file)
    finally:
        os.close(file)


def to_disk(file: int, offset: int, flags: int) -> None:
    """Begin to write a piece of a file, or wait for its end; do nothing where the kernel has no such call."""
    if sync_file_range(file, offset, _PIECE_BYTES, flags):
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
            raise OSError(code, os.strerror(code))


def _head(text: bytes, nbytes: int) -> bytes:
    head = _HEAD.pack(_MAGIC, 0, len(text), nbytes)
    return head[:4] + struct.pack("<I", zlib.crc32(text, zlib.crc32(head[_CHECKED:]))) + head[_CHECKED:]


def _read(file: int, head: bytes, offset: int) -> tuple[Record | None, int]:
    """Return the record with this head, None for a mark, and its end; CheckpointError for other bytes."""
    magic, crc, text_bytes, nbytes = _HEAD.unpack(head)
    if magic != _MAGIC or text_bytes > _MOST_TEXT_BYTES:
        raise CheckpointError("no record")
    start = offset + _HEAD.size
    text = os.pread(file, text_bytes, start)
    end = start + text_bytes + nbytes + (_CRC.size if text_bytes else 0)
    if len(text) < text_bytes:  # torn
        return None, end + 1
    if zlib.crc32(text, zlib.crc32(head[_CHECKED:])) != crc:
        raise CheckpointError("no record")
    if not text:
        return None, end
    fields = json.loads(text)
    chunk = Chunk(fields["run"], tuple(fields["part"]))
    return Record(chunk, fields["sizes"], start + text_bytes), end


def _next_record(file: int, offset: int, size: int) -> int | None:
    """Return the offset of the first record, or mark, from an offset on."""
    while offset < size:
        piece = os.pread(file, _PIECE_BYTES, offset)
        for match in re.finditer(re.escape(_MAGIC), piece):
            at = offset + match.start()
            with contextlib.suppress(CheckpointError, struct.error):
                if _read(file, os.pread(file, _HEAD.size, at), at)[1] <= size:
                    return at
        offset += max(len(piece) - len(_MAGIC) + 1, 1)  # one may begin in the last bytes
    return None


def _crc(file: int, offset: int) -> int | None:
    """Return the checksum behind frames."""
    text = os.pread(file, _CRC.size, offset)
    return _CRC.unpack(text)[0] if len(text) == _CRC.size else None


@contextlib.contextmanager
def _opened(folder: Path, chunk: Chunk, place: Place) -> Iterator[tuple[int, Record]]:
    with (folder / place.segment).open("rb", buffering=0) as file:
        head = os.pread(file.fileno(), _HEAD.size, place.offset)
        try:
            record, _ = _read(file.fileno(), head, place.offset)
        except (CheckpointError, struct.error):
            record = None
        if record is None or record.chunk != chunk:
            raise _damaged(folder, place, f"part {list(chunk.part)} is not there")
        yield file.fileno(), record


def _damaged(folder: Path, place: Place, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder / place.segment} is damaged at byte {place.offset}: {why}. The same script, started again, computes "
        "the chunk again"
    )
