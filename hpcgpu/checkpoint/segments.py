"""Segments: files of chunks, only ever appended to, which open after a crash at any byte.

A segment is a row of records. A record is a head, a text and frames. The head has the text's and the frames' length and
a checksum of the text; the text, JSON, names the chunk and has a checksum of the frames. A record without a text is a
mark: everything before it is synced. Chunks after the last mark count only if their frames have the right checksum.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcgpu.errors import CheckpointError

SEGMENT, OWNER = ".segment", "owner"  # names of files
SEGMENT_BYTES = 1 << 30
_MAGIC = b"hgc1"
# magic, CRC-32 of what follows and of the text, bytes of the text, bytes of the frames
_HEAD = struct.Struct("<4sIIQ")
_MOST_TEXT_BYTES = 1 << 24
_PIECE_BYTES = 1 << 23
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
    """A record's text, and where its frames begin."""

    chunk: Chunk
    sizes: list[int]  # bytes of each frame
    crc: int  # of all frames
    frames_offset: int


class SegmentWriter:
    """The segments of one worker, for one thread. After a failed call nothing of its record is in the file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stem, self._number = folder, secrets.token_hex(6), 0
        self._file = -1
        self._end = 0  # of the last complete record

    def append(self, chunk: Chunk, frames: Sequence[memoryview]) -> int:
        """Write a record; return the bytes of its frames; OSError if there is no room."""
        if self._end >= SEGMENT_BYTES:
            self.sync()
            self.close()
        if self._file < 0:
            self._open()
        crc = 0
        for frame in frames:
            crc = zlib.crc32(frame, crc)
        sizes = [frame.nbytes for frame in frames]
        text = json.dumps({"run": chunk.run, "part": chunk.part, "sizes": sizes, "crc": crc}).encode()
        self._write([memoryview(_head(text, sum(sizes)) + text), *frames])
        return sum(sizes)

    def sync(self) -> None:
        """Bring all records to the disk, and mark them as synced; after an OSError none since the last sync counts."""
        if self._file < 0:
            return
        try:
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
        self._end = 0
        sync_folder(self._folder)

    def _write(self, frames: Sequence[memoryview]) -> None:
        try:
            for frame in frames:
                view = frame.cast("B")
                while view.nbytes:
                    view = view[os.write(self._file, view) :]
        except OSError:
            try:
                os.ftruncate(self._file, self._end)
                os.lseek(self._file, self._end, os.SEEK_SET)
            except OSError:  # a file server that is away; a reader stops at the torn record
                self.close()
            raise
        self._end = os.lseek(self._file, 0, os.SEEK_CUR)


class Index:
    """The chunks in a folder's segments. :meth:`refresh` reads what came since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.chunks: dict[Chunk, Place] = {}
        self.unsure: dict[Chunk, Place] = {}  # whole, but not marked as synced
        self.damage: dict[str, int] = {}  # segments, and the offset from which they cannot be read
        self._ends: dict[str, int] = {}

    def refresh(self) -> None:
        """Read new records of all segments."""
        names = {path.name for path in self._folder.glob(f"*{SEGMENT}")}
        if gone := self._ends.keys() - names:
            self._ends = {name: end for name, end in self._ends.items() if name not in gone}
            for places in (self.chunks, self.unsure):
                for chunk in [chunk for chunk, place in places.items() if place.segment in gone]:
                    del places[chunk]
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError), (self._folder / name).open("rb", buffering=0) as file:
                self._scan(name, file.fileno())

    def check(self) -> None:
        """Read the frames of chunks without a mark; take those that are whole."""
        for chunk, place in self.unsure.items():
            if is_whole(self._folder, chunk, place):
                self.chunks[chunk] = place
        self.unsure = {}

    def _scan(self, name: str, file: int) -> None:
        size, offset = os.fstat(file).st_size, self._ends.get(name, 0)
        self.damage.pop(name, None)
        while size - offset >= _HEAD.size:
            head = os.pread(file, _HEAD.size, offset)
            try:
                record, end = _read(file, head, offset)
            except CheckpointError:
                self.damage[name] = offset
                break
            if end > size:  # being written, or torn by a crash
                break
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
        if crc != record.crc:
            raise _damaged(folder, place, "its checksum is another one")
        return frames


def is_whole(folder: Path, chunk: Chunk, place: Place) -> bool:
    """Return whether a chunk's frames are as they were written; reads them piece by piece."""
    try:
        with _opened(folder, chunk, place) as (file, record):
            left, offset, crc = place.nbytes, record.frames_offset, 0
            while left and (piece := os.pread(file, min(left, _PIECE_BYTES), offset)):
                left, offset, crc = left - len(piece), offset + len(piece), zlib.crc32(piece, crc)
            return not left and crc == record.crc
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
    end = start + text_bytes + nbytes
    if len(text) < text_bytes:  # torn
        return None, end + 1
    if zlib.crc32(text, zlib.crc32(head[_CHECKED:])) != crc:
        raise CheckpointError("no record")
    if not text:
        return None, end
    fields = json.loads(text)
    chunk = Chunk(fields["run"], tuple(fields["part"]))
    return Record(chunk, fields["sizes"], fields["crc"], start + text_bytes), end


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
