"""The format of segments: what is read is what was written, after a crash or damage at any byte."""

import errno
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.checkpoint import segments
from hpcgpu.checkpoint.segments import Chunk, Index, SegmentWriter, is_whole, read
from hpcgpu.errors import CheckpointError

FRAMES = st.lists(st.binary(max_size=50), min_size=1, max_size=4)
THREE = [(Chunk("run", (0, i)), [b"head %d" % i, b"", bytes(range(20))]) for i in range(3)]


def written(folder: Path, records: list[tuple[Chunk, list[bytes]]], synced: int) -> Path:
    """Write records, of which the first ``synced`` have a mark behind them; return the segment."""
    writer = SegmentWriter(folder)
    for i, (chunk, frames) in enumerate(records):
        writer.append(chunk, [memoryview(frame) for frame in frames])
        if i + 1 == synced:
            writer.sync()
    writer.close()
    (path,) = folder.glob("*.segment")
    return path


def opened(folder: Path) -> dict[Chunk, list[bytes]]:
    """Return what a reader after a crash gets."""
    index = Index(folder)
    index.refresh()
    index.check()
    return {c: [bytes(f) for f in read(folder, c, p)] for c, p in index.chunks.items() if is_whole(folder, c, p)}


@given(st.lists(FRAMES, min_size=1, max_size=6), st.integers(0, 6))
def test_segment_of_any_frames_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[bytes]], synced: int
) -> None:
    folder = tmp_path_factory.mktemp("segments")
    records = [(Chunk("run", (i,)), frames) for i, frames in enumerate(values)]
    written(folder, records, synced)
    assert opened(folder) == dict(records)


@pytest.mark.parametrize("tail", [b"", bytes(40)], ids=["cut", "zeros"])
def test_segment_cut_at_any_byte_keeps_what_is_before(tmp_path: Path, tail: bytes) -> None:
    ends = []
    for count in (1, 2, 3):
        (tmp_path / str(count)).mkdir()
        ends.append(written(tmp_path / str(count), THREE[:count], 0).stat().st_size)
    (path,) = (tmp_path / "3").glob("*.segment")
    whole = path.read_bytes()
    cut = tmp_path / "cut"
    cut.mkdir()
    for size in range(len(whole) + 1):
        (cut / "a.segment").write_bytes(whole[:size] + tail)
        assert opened(cut) == dict(THREE[: sum(end <= size for end in ends)]), size


def test_segment_with_any_byte_changed_loses_one_chunk(tmp_path: Path) -> None:
    path = written(tmp_path, THREE, 2)
    whole = path.read_bytes()
    lost = []
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        left = opened(tmp_path)
        assert left.items() <= dict(THREE).items(), i
        lost.append(3 - len(left))
    assert set(lost) == {0, 1}
    assert lost.count(0) == 20  # of the mark


def test_segment_with_damage_anywhere_keeps_later_chunks(tmp_path: Path) -> None:
    path = written(tmp_path, THREE, 3)
    whole = path.read_bytes()
    for i in range(0, len(whole) - 60):
        path.write_bytes(whole[:i] + bytes(60) + whole[i + 60 :])
        index = Index(tmp_path)
        index.refresh()
        index.check()
        index.refresh()
        left = [c for c, p in index.chunks.items() if is_whole(tmp_path, c, p)]
        assert len(left) >= 1, i
        assert {c for c, _ in THREE} - set(index.chunks) == set() or path.name in index.damage, i


def test_chunk_that_is_damaged_is_an_error_with_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, THREE, 3)
    index = Index(tmp_path)
    index.refresh()
    path.write_bytes(path.read_bytes().replace(b"head 1", b"HEAD 1"))
    chunk = Chunk("run", (0, 1))
    assert not is_whole(tmp_path, chunk, index.chunks[chunk])
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged at byte \d+: its checksum"):
        read(tmp_path, chunk, index.chunks[chunk])


def test_index_takes_only_synced_chunks_until_it_checks(tmp_path: Path) -> None:
    written(tmp_path, THREE, 2)
    index = Index(tmp_path)
    index.refresh()
    assert (list(index.chunks), list(index.unsure)) == ([c for c, _ in THREE[:2]], [THREE[2][0]])
    index.check()
    assert len(index.chunks) == 3


def test_index_of_a_growing_segment_reads_what_is_new(tmp_path: Path) -> None:
    writer, index = SegmentWriter(tmp_path), Index(tmp_path)
    for i, (chunk, frames) in enumerate(THREE):
        writer.append(chunk, [memoryview(frame) for frame in frames])
        index.refresh()
        assert chunk in index.unsure
        writer.sync()
        index.refresh()
        assert len(index.chunks) == i + 1
    writer.close()


def test_writer_on_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    writer, write = SegmentWriter(tmp_path), os.writev
    views = [memoryview(frame) for frame in THREE[0][1]]
    writer.append(THREE[0][0], views)

    def full(file: int, data: list[memoryview]) -> int:
        if len(data[0]) > 10:
            return write(file, [data[0][:10]])
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch("os.writev", full), pytest.raises(OSError, match="No space"):
        writer.append(THREE[1][0], views)
    writer.append(THREE[2][0], views)
    writer.close()
    assert list(opened(tmp_path)) == [THREE[0][0], THREE[2][0]]


def test_writer_whose_sync_fails_begins_a_new_segment(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(THREE[0][0], [memoryview(b"x")])
    with mock.patch("os.fsync", side_effect=OSError(errno.EIO, "I/O error")), pytest.raises(OSError, match="I/O"):
        writer.sync()
    writer.append(THREE[0][0], [memoryview(b"x")])
    writer.sync()
    writer.close()
    assert len(list(tmp_path.glob("*.segment"))) == 2
    assert opened(tmp_path) == {THREE[0][0]: [b"x"]}


def test_writer_begins_one_file_for_each_full_one(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    with mock.patch.object(segments, "SEGMENT_BYTES", 1000):
        for i in range(50):
            writer.append(Chunk("run", (i,)), [memoryview(bytes(100))])
    writer.sync()
    writer.close()
    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) <= 1 + nbytes // 1000
    assert len(opened(tmp_path)) == 50


def test_large_chunk_leaves_little_to_the_sync_and_in_memory(tmp_path: Path) -> None:
    if b"tmpfs" in subprocess.check_output(["stat", "-f", "-c%T", tmp_path]):
        pytest.skip("a tmpfs keeps its pages")
    (writer := SegmentWriter(tmp_path)).append(Chunk("run", (0,)), [memoryview(bytes(100 << 20))])
    with next(tmp_path.iterdir()).open("rb") as file:
        assert os.preadv(file.fileno(), [bytearray(1)], 99 << 20, os.RWF_NOWAIT) == 1
        for mib in (1, 30, 59):  # on the disk, and not in the page cache
            with pytest.raises(BlockingIOError):
                os.preadv(file.fileno(), [bytearray(1)], mib << 20, os.RWF_NOWAIT)
    writer.close()


def test_writer_told_of_a_lost_piece_counts_no_chunk_as_synced(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(THREE[0][0], [memoryview(b"x")])
    lost = OSError(errno.EIO, "I/O error")
    with mock.patch.object(segments, "to_disk", side_effect=lost), pytest.raises(OSError, match="I/O"):
        writer.append(THREE[1][0], [memoryview(bytes(9 << 20))])
    with pytest.raises(OSError, match="I/O"):  # the kernel tells of it once, and an fsync would succeed
        writer.sync()
    writer.append(THREE[2][0], [memoryview(b"x")])
    writer.sync()
    writer.close()
    index = Index(tmp_path)
    index.refresh()
    assert list(index.chunks) == [THREE[2][0]]


def test_writer_whose_sync_of_a_full_file_fails_says_so_again(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(THREE[0][0], [memoryview(b"x")])
    lost = mock.patch("os.fsync", side_effect=OSError(errno.EIO, "I/O error"))
    with mock.patch.object(segments, "SEGMENT_BYTES", 1), lost, pytest.raises(OSError, match="I/O"):
        writer.append(THREE[1][0], [memoryview(b"x")])
    with pytest.raises(OSError, match="I/O"):
        writer.sync()
    writer.sync()
    writer.close()
