"""Room in the files of the disk tier: no two objects overlap, the limit holds, free room goes back."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import tempfile
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.storage import segments
from hpcgpu.spill.storage.disk import Disk, Stored
from hpcgpu.spill.storage.segments import PAGE_BYTES, Extent, Extents, Room, Segments, divide, room_for
from hpcgpu.spill.store import spill_thread

KIB, MIB = 2**10, 2**20


def some(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def on_disk(folder: Path) -> int:
    """Return what the files take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def shrink(disk: Disk) -> None:
    disk.empty_bin()
    while disk.has_excess:
        disk.shrink()


class FileSystem:
    """What fallocate is where the file system knows no holes, or nothing of it at all."""

    real = segments._fallocate

    def __init__(self, *, reserves: bool = False, makes_holes: bool = False, error: int = errno.EOPNOTSUPP) -> None:
        self.knows = {0: reserves, segments._HOLE: makes_holes}
        self.error, self.holes = error, 0

    def __call__(self, fd: int, mode: int, start: int, nbytes: int) -> int:
        self.holes += mode == segments._HOLE
        if self.knows[mode]:
            return int(self.real(fd, mode, start, nbytes))
        ctypes.set_errno(self.error)
        return -1


FILE_SYSTEMS = {
    "holes": FileSystem(reserves=True, makes_holes=True),
    "no holes": FileSystem(reserves=True),
    "no fallocate": FileSystem(),
}


@pytest.fixture(params=FILE_SYSTEMS)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(segments, "_fallocate", FILE_SYSTEMS[request.param])
    return str(request.param)


# ---- extents


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 2)), max_size=60))
def test_free_extents_are_what_was_added_and_not_taken(steps: list[tuple[int, bool, int]]) -> None:
    """Beside a set of free pages: what is taken was free, what touches is one, and what is asked for is found."""
    free = Extents()
    taken = [Extent("a", 0, 200 * PAGE_BYTES), Extent("b", 0, 100 * PAGE_BYTES)]
    pages = set[tuple[str, int]]()
    for size, gives, which in steps:
        if gives and taken:
            back = taken.pop(which % len(taken))
            found = free.add(back)
            pages |= _pages(back)
            assert _pages(back) <= _pages(found) <= pages
            assert not {(found.file, found.start - PAGE_BYTES), (found.file, found.start + found.nbytes)} & pages
        else:
            got = free.take(size * PAGE_BYTES)
            if got is None:
                assert _longest(pages) < size * 9 / 8 + 1  # one that is hardly larger may be passed over
                if pages:
                    got = free.take_large()
            else:
                assert got.nbytes == size * PAGE_BYTES
            if got is not None:
                assert _pages(got) <= pages
                pages -= _pages(got)
                taken.append(got)
        assert free.nbytes == len(pages) * PAGE_BYTES
    free.take_file("a")
    assert free.nbytes == sum(PAGE_BYTES for file, _ in pages if file == "b")


def _pages(extent: Extent) -> set[tuple[str, int]]:
    return {(extent.file, at) for at in range(extent.start, extent.start + extent.nbytes, PAGE_BYTES)}


def _longest(pages: set[tuple[str, int]]) -> int:
    best = run = 0
    last = None
    for file, at in sorted(pages):
        run = run + 1 if last == (file, at - PAGE_BYTES) else 1
        best, last = max(best, run), (file, at)
    return best


# ---- pieces


@given(st.integers(0, 2**40))
def test_room_is_whole_pages_and_a_sixteenth_too_much_at_most(nbytes: int) -> None:
    room = room_for(nbytes)
    assert room % PAGE_BYTES == 0
    assert nbytes <= room <= max(nbytes * 17 / 16, nbytes + PAGE_BYTES - 1)
    assert room_for(room) == room


@given(st.lists(st.binary(min_size=1, max_size=9)), st.lists(st.integers(0, 20)))
def test_views_are_divided_anywhere(parts: list[bytes], steps: list[int]) -> None:
    left, found = [memoryview(p) for p in parts], b""
    for step in (*steps, 1000):
        first, left = map(list, divide(left, step))
        assert len(b"".join(first)) == min(step, len(b"".join(parts)) - len(found))
        found += b"".join(first)
        assert all(map(len, (*first, *left)))  # a write of nothing would go on for ever
    assert (found, left) == (b"".join(parts), [])


def test_the_last_room_is_used_however_it_is_cut_up(tmp_path: Path, file_system: str) -> None:
    disk = Disk(str(tmp_path), limit_bytes=MIB)
    small = [disk.write([memoryview(some(PAGE_BYTES, i))]) for i in range(250)]
    with pytest.raises(OSError, match=r"the files would exceed 1.0 MiB .*max-spill"):
        disk.write([memoryview(some(20 * KIB))])
    kept = small[::2]
    del small
    given = [some(n, i) for i, n in enumerate((1, 70 * KIB, 0, 300_001))]
    large = disk.write([memoryview(g) for g in given])
    assert len(large.slot) > 10
    assert [b.tobytes() for b in disk.read(large)] == given
    assert [disk.read(s)[0].tobytes() for s in kept] == [some(PAGE_BYTES, i) for i in range(0, 250, 2)]
    assert on_disk(disk.folder) <= MIB
    disk.close()


# ---- the file system


@pytest.mark.parametrize("home", ["/dev/shm", None], ids=["tmpfs", "default"])
def test_the_files_take_no_more_than_may_and_what_the_tier_says(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_thread, "_FREE_S", 0.0)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        store = GpuSpillBuffer(0, "1MB", folder, max_spill="20MB", quiet=True)
        rng = random.Random(0)
        sizes = np.geomspace(5_000, 3_000_000, 30).astype(int).tolist()
        for i in range(150):
            store[i] = np.full(rng.choice(sizes), i, "u1")
            assert on_disk(store.disk.folder) <= 20e6
        assert store.settle()
        os.sync()
        for part in (0.5, 0.8, 1):
            assert_they_agree(store)
            for key in [key for key in store if rng.random() < part]:
                del store[key]
            assert store.settle()
        assert on_disk(store.disk.folder) == store.tiers["disk"] == 0
        store.close()


def assert_they_agree(store: GpuSpillBuffer) -> None:
    said, taken = store.tiers["disk"], on_disk(store.disk.folder)
    assert said <= taken <= min(said + max(said / 8, MIB) + said / 64 + 2 * PAGE_BYTES, 20e6)


def test_room_that_is_used_again_soon_is_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = FileSystem(reserves=True, makes_holes=True)
    monkeypatch.setattr(segments, "_fallocate", counting)
    monkeypatch.setattr(spill_thread, "_FREE_S", 3600.0)
    store = GpuSpillBuffer(0, "1MB", str(tmp_path), quiet=True)
    for i in range(20):
        store[i] = np.full(MIB, i, "u1")
    assert store.settle()
    before = on_disk(store.disk.folder)
    for i in range(10):
        del store[i]
    assert store.settle()
    assert on_disk(store.disk.folder) == before
    assert store.disk.has_excess
    for i in range(20, 30):
        store[i] = np.full(MIB, i, "u1")
    assert store.settle()
    assert on_disk(store.disk.folder) <= before + MIB
    assert counting.holes == 0
    store.close()


def test_without_holes_files_get_shorter_from_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_fallocate", FileSystem())
    disk = Disk(str(tmp_path))
    there = [disk.write([memoryview(some(MIB, i))]) for i in range(10)]
    del there[8]
    shrink(disk)  # finds out
    del there[2:]
    shrink(disk)
    assert on_disk(disk.folder) == 2 * MIB
    there += [disk.write([memoryview(some(MIB, i))]) for i in range(2, 4)]
    assert [disk.read(s)[0].tobytes() for s in there] == [some(MIB, i) for i in range(4)]
    disk.close()


def test_not_each_object_that_goes_makes_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = FileSystem(reserves=True, makes_holes=True)
    monkeypatch.setattr(segments, "_fallocate", counting)
    disk = Disk(str(tmp_path))
    there = [disk.write([memoryview(bytes(10 * KIB))]) for _ in range(1000)]
    for _ in range(500):
        there.pop(300)
        shrink(disk)
    assert 0 < counting.holes < 20
    disk.close()


def test_a_file_that_refuses_a_hole_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segments, "_fallocate", FileSystem(reserves=True, error=errno.EIO))
    disk = Disk(str(tmp_path))
    there = [disk.write([memoryview(some(MIB, i))]) for i in range(10)]
    del there[5:]
    shrink(disk)
    assert caplog.text.count("cannot be given back") == 1
    there.append(disk.write([memoryview(some(MIB, 5))]))
    assert [disk.read(s)[0].tobytes() for s in there] == [some(MIB, i) for i in range(6)]
    assert len({piece.file.path for s in there for piece in s.slot}) == 2
    del there[:5]
    shrink(disk)
    assert on_disk(disk.folder) <= 2 * MIB
    disk.close()


class FullDisk:
    """A disk with so many bytes left; it gives no more than are there."""

    def __init__(self, left: int) -> None:
        self.left = left

    def reserve(self, fd: int, start: int, nbytes: int) -> None:
        if nbytes > self.left:
            raise OSError(28, "No space left on device")
        self.left -= nbytes
        os.ftruncate(fd, start + nbytes)


@given(st.lists(st.sampled_from([1, 5000, 40_000, 300_000]), max_size=200))
@settings(max_examples=40, deadline=None)
def test_the_last_room_of_a_disk_is_used(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    full = FullDisk(3 * MIB)
    room = Segments(tmp_path_factory.mktemp("room"), full.reserve)
    taken = []
    for size in sizes:
        try:
            taken.append(room.take(size))
        except OSError:
            assert full.left < room_for(size)
            assert room.used_bytes + room_for(size) > 3 * MIB
    assert_apart(taken)
    room.give_back(taken)
    assert all(not piece.file.path.exists() for slot in taken for piece in slot)
    assert (room.used_bytes, room.held_bytes) == (0, 0)


def assert_apart(slots: list[Room]) -> None:
    """All lie in what was reserved of a file, and none upon another."""
    pieces = sorted((p.file.path, p.start, p.start + p.nbytes, p.file.end) for slot in slots for p in slot)
    assert all(end <= reserved for *_, end, reserved in pieces)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(pieces))


SMALL = {"SEGMENT_BYTES": 2 * MIB, "_UNIT_BYTES": 64 * KIB, "_MOST_KEPT_BYTES": 256 * KIB}
SMALL |= {"_AT_ONCE": 4, "_KEPT_OPEN": 3}


class RoomInAnyOrder(RuleBasedStateMachine):
    """Room is taken, given back and trimmed in any order, on any file system, with a limit or without."""

    @initialize(kind=st.sampled_from(sorted(FILE_SYSTEMS)), limit=st.sampled_from([0, 3 * MIB]))
    def start(self, kind: str, limit: int) -> None:
        self.patches = [mock.patch.multiple(segments, **SMALL)]
        self.patches.append(mock.patch.object(segments, "_fallocate", FILE_SYSTEMS[kind]))
        for patch in self.patches:
            patch.start()
        self.home = tempfile.TemporaryDirectory()
        self.room = Segments(Path(self.home.name), most_bytes=limit)
        self.limit, self.kind = limit, kind
        self.taken: list[Room] = []

    @rule(size=st.sampled_from([1, 4096, 5000, 50_000, 300_000, 1_200_000]), count=st.integers(1, 20))
    def take(self, size: int, count: int) -> None:
        for _ in range(count):
            try:
                slot = self.room.take(size)
            except OSError:
                assert self.limit
                lists_bytes = 8 * PAGE_BYTES * len(self.files())
                assert self.room.used_bytes + room_for(size) > self.limit * 127 / 128 - lists_bytes
                return
            assert sum(piece.nbytes for piece in slot) == room_for(size)
            self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule(part=st.floats(0.1, 1), seed=st.integers(0, 99))
    def give_back(self, part: float, seed: int) -> None:
        random.Random(seed).shuffle(self.taken)
        count = int(len(self.taken) * part) + 1
        self.room.give_back(self.taken[:count])
        del self.taken[:count]

    @rule()
    def trim(self) -> None:
        while self.room.has_excess:
            self.room.trim()

    @invariant()
    def nothing_lies_upon_another(self) -> None:
        assert_apart(self.taken)
        assert self.room.used_bytes == sum(piece.nbytes for slot in self.taken for piece in slot)

    @invariant()
    def no_more_is_taken_than_may(self) -> None:
        files = self.files()
        assert {piece.file.path for slot in self.taken for piece in slot} == files
        assert on_disk(Path(self.home.name)) <= self.room.held_bytes
        assert not self.limit or self.room.held_bytes <= self.limit

    @invariant()
    def what_is_free_goes_back(self) -> None:
        if self.kind == "holes" and not self.room.has_excess:
            lists_bytes = (len(self.files()) + 1) * 4 * PAGE_BYTES
            assert self.room.held_bytes <= self.room.used_bytes + self.room.kept_bytes + lists_bytes
        if not self.taken:
            assert self.room.held_bytes == on_disk(Path(self.home.name)) == 0

    def files(self) -> set[Path]:
        return set(Path(self.home.name).iterdir())

    def teardown(self) -> None:
        if hasattr(self, "home"):
            self.room.close()
            self.home.cleanup()
            for patch in reversed(self.patches):
                patch.stop()


TestRoom = RoomInAnyOrder.TestCase
TestRoom.settings = settings(deadline=None, max_examples=40, stateful_step_count=15)


def test_threads_share_the_room_while_it_is_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(segments, name, value)
    disk = Disk(str(tmp_path), limit_bytes=12 * MIB)
    wrong = list[int]()

    def work(seed: int) -> None:
        rng, there = random.Random(seed), list[tuple[int, Stored]]()
        for step in range(200):
            name = (seed * 200 + step) % 251
            try:
                there.append((name, disk.write([np.full(rng.choice([100, 5000, 70_000, 900_000]), name, "u1").data])))
            except OSError:
                there = there[::2]
            looked, stored = rng.choice(there or [(name, disk.write([memoryview(bytes([name]))]))])
            if set(np.unique(disk.read(stored)[0]).tolist()) != {looked}:
                wrong.append(looked)
            if len(there) > 12:
                del there[:: rng.choice([1, 2, 3])]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        shrink(disk)
        threads[0].join(0.001)
    assert wrong == []
    assert on_disk(disk.folder) <= 12 * MIB
    shrink(disk)
    assert on_disk(disk.folder) == 0
    disk.close()
