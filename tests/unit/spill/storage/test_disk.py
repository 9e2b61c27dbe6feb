"""The disk tier, the room in its files, the pool of host buffers, and warnings about a folder."""

import ctypes
import errno
import gc
import itertools
import os
import random
import resource
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from programs import python
from shared_host import as_neighbour
from spill_stores import NewStore, put
from waiting import aside, scaled

from hpcgpu.errors import ConfigError
from hpcgpu.host.scratch import Mount, mount_of, notes
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.storage import segments
from hpcgpu.spill.storage.disk import SMALLEST_BYTES, Disk, Slabs, Stored, round_up
from hpcgpu.spill.storage.segments import PAGE_BYTES, Extent, Extents, Room, Segments, divide, room_for
from hpcgpu.spill.store import spill_thread

KIB, MIB = 2**10, 2**20
LIMITED = """
import ctypes, errno, resource, signal, sys
import numpy as np
from hpcgpu.spill.storage import segments
from hpcgpu.spill.storage.disk import Disk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if sys.argv[2] == "no fallocate":
    segments._fallocate = lambda *args: ctypes.set_errno(errno.EOPNOTSUPP) or -1
disk = Disk(sys.argv[1])
kept = [disk.write([np.zeros(11_000, "u1").data])]
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, -1))
try:
    while True:
        kept.append(disk.write([np.full(5_000, len(kept), "u1").data, np.full(6_000, len(kept), "u1").data]))
except OSError as e:
    print(e.strerror, len(kept))
try:
    disk.write([np.zeros(40_000, "u1").data, np.zeros(20_000, "u1").data])
except OSError as e:
    print(e.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
kept += [disk.write([np.full(11_000, i, "u1").data]) for i in range(4, 10)]
print(all((part == i).all() for i, s in enumerate(kept) for part in disk.read(s)))
disk.close()
"""
MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
25 22 0:22 / /proc rw,nosuid shared:5 - proc proc rw
30 22 0:27 / {tmp} rw shared:9 - autofs systemd-1 rw,fd=32
31 30 0:51 / {tmp} rw,relatime shared:10 master:3 - {kind} {source} rw,vers=4.2
32 31 0:60 / {tmp}/node\\040local rw - xfs /dev/nvme0n1 rw
33 31 0:61 / {tmp}x rw - tmpfs none rw
"""
NETWORKS = ("nfs4", "nfs", "lustre", "gpfs", "beegfs", "cifs", "ceph")
NOTES = dict.fromkeys(NETWORKS, "is on a network file system ({kind}, server:/export on {tmp})")
SMALL = {"SEGMENT_BYTES": 2 * MIB, "_UNIT_BYTES": 64 * KIB, "_MOST_KEPT_BYTES": 256 * KIB}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(str(tmp_path))
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def files(disk: Disk) -> list[Path]:
    return sorted(p for p in disk.folder.iterdir() if p.name != ".lock")


def some(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(nbytes), np.uint8)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def contents(disk: Disk, stored: Stored) -> list[bytes]:
    return [b.tobytes() for b in disk.read(stored)]


# ---- disk


@pytest.mark.parametrize("sizes", [[], [0], [0, 0], [1], [0, 1, 0], [4096], [4097, 5], [3] * 3000, [300 * KIB, 0, 7]])
def test_what_is_written_comes_back(disk: Disk, sizes: list[int]) -> None:
    arrays = [some(n, i) for i, n in enumerate(sizes)]
    other = disk.write([some(sum(sizes) or 1, -1).data])
    stored = disk.write([memoryview(a.view("i4") if a.nbytes % 4 == 0 else a) for a in arrays])
    disk.write([some(sum(sizes) or 1, -2).data])
    assert contents(disk, stored) == [a.tobytes() for a in arrays]
    assert contents(disk, other) == [some(sum(sizes) or 1, -1).tobytes()]


def test_what_may_not_lie_on_disk_stays_in_memory(stored: NewStore, caplog: pytest.LogCaptureFixture) -> None:
    store = stored(memory_limit=10 * MIB, target=0.4, max_spill="3.5 MiB")
    put(store, range(10), lambda i: some(MIB, i))
    assert 3 * MIB <= store.tiers["disk"] <= 3.5 * MIB
    assert store.tiers["host"] == 7 * MIB
    assert all(np.array_equal(store[i], some(MIB, i)) for i in range(10))
    assert "stay in the host tier" in caplog.text
    with pytest.raises(ConfigError, match="is not a size"):
        GpuSpillBuffer(max_spill=0.5)


def test_a_large_object_has_a_file_of_its_own(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", MIB)
    large = [disk.write([some(600 * KIB, i).data]) for i in range(3)]
    assert len(files(disk)) == 3
    assert [len(b) for s in large for b in contents(disk, s)] == [600 * KIB] * 3
    del large[1]
    disk.empty_bin()
    assert len(files(disk)) == 2
    assert contents(disk, large[1]) == [some(600 * KIB, 2).tobytes()]


def test_more_files_than_are_kept_open(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 64 * KIB)
    before = open_files()
    stored = [disk.write([some(64 * KIB, i).data]) for i in range(150)]
    assert len(files(disk)) == 150
    assert open_files() - before == 64
    assert all(contents(disk, s) == [some(64 * KIB, i).tobytes()] for i, s in enumerate(stored))
    del stored[10:]
    disk.empty_bin()
    assert open_files() - before == 0  # the newest ones were
    disk.close = lambda: None  # type: ignore[method-assign]
    Disk.close(disk)
    assert open_files() - before == -1  # nor the lock's


def test_a_cut_file_says_so_and_is_not_written_to(disk: Disk) -> None:
    stored = [disk.write([some(10 * KIB, i).data]) for i in range(5)]
    (cut,) = files(disk)
    os.truncate(cut, 20 * KIB)
    for lost in stored[2:]:
        with pytest.raises(OSError, match=f"{cut} is cut off"):
            disk.read(lost)
    assert contents(disk, stored[0]) == [some(10 * KIB, 0).tobytes()]
    del stored[0]
    new = [disk.write([some(10 * KIB, i).data]) for i in range(5, 8)]
    with pytest.raises(OSError, match="cut off"):  # and not zeros, as if the file had grown again
        disk.read(stored[-1])
    assert [contents(disk, s) for s in new] == [[some(10 * KIB, i).tobytes()] for i in range(5, 8)]
    assert len(files(disk)) == 2
    del stored[:], lost
    disk.empty_bin()
    assert cut not in files(disk)


@pytest.mark.parametrize("kind", ["fallocate", "no fallocate"])
def test_short_writes_and_refused_ones_lose_nothing(tmp_path: Path, kind: str) -> None:
    """A limit of the kernel on files that are longer already: the fifth object is written in part, then refused."""
    done = python(LIMITED, tmp_path, kind)
    assert done.stdout == "File too large 4\nFile too large\nTrue\n", done.stderr


# ---- slabs


@given(st.integers(1, 2**40))
def test_buffers_are_whole_pages_and_an_eighth_too_large_at_most(nbytes: int) -> None:
    size = round_up(nbytes)
    assert size % 4096 == 0
    assert nbytes <= size < max(nbytes * 9 / 8, nbytes + 4096)
    assert round_up(size) == size
    assert len({round_up(n) for n in range(nbytes, 2 * nbytes, nbytes // 99 + 1)}) <= 9


def bytes_lent(pool: Slabs) -> int:
    return -pool.free_bytes + pool._held_bytes


def test_memory_is_used_again_when_its_last_view_goes() -> None:
    pool = Slabs(10 * MIB)
    array = pool.empty(MIB)
    assert (array.shape, array.dtype, array.ctypes.data % resource.getpagesize()) == ((MIB,), np.uint8, 0)
    assert array.flags.c_contiguous and array.flags.writeable
    where = array.ctypes.data
    array[:] = 7
    view = memoryview(array[5:100][::2])
    del array
    gc.collect()
    assert pool.empty(MIB).ctypes.data != where
    assert (view[0], pool.free_bytes) == (7, MIB)
    del view
    assert (bytes_lent(pool), pool.free_bytes) == (0, 2 * MIB)
    assert {pool.empty(MIB).ctypes.data for _ in range(3)} <= {where, *[a.ctypes.data for a in [pool.empty(MIB)]]}


def test_the_pool_is_bounded() -> None:
    pool = Slabs(3 * MIB)
    lent = [pool.empty(MIB) for _ in range(5)]
    assert bytes_lent(pool) == 3 * MIB
    assert [len(a) for a in lent] == [MIB] * 5
    lent.clear()
    assert (pool.free_bytes, bytes_lent(pool)) == (3 * MIB, 0)
    other = pool.empty(2 * MIB)  # another size: what is free makes room for it
    assert (pool.free_bytes, bytes_lent(pool)) == (MIB, 2 * MIB)
    assert pool.empty(SMALLEST_BYTES - 1).size == SMALLEST_BYTES - 1
    assert bytes_lent(pool) == other.nbytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_trim_gives_memory_back_to_the_system() -> None:
    pool = Slabs(256 * MIB)
    before = resident_bytes()
    array = pool.empty(128 * MIB)
    array[:] = 1
    del array
    assert resident_bytes() - before > 100 * MIB
    assert pool.trim() == 128 * MIB
    assert resident_bytes() - before < 30 * MIB
    assert (pool.free_bytes, bytes_lent(pool), pool.trim()) == (0, 0, 0)


def test_arrays_that_gc_finds_in_the_middle_come_back() -> None:
    """A cycle is collected wherever Python allocates: also where the pool holds its lock."""
    pool = Slabs(64 * MIB)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(2000):
            cycle: list[object] = [pool.empty(SMALLEST_BYTES)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert bytes_lent(pool) == 0


def test_threads_share_the_pool() -> None:
    pool = Slabs(8 * MIB)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            array = pool.empty(rng.choice([MIB // 2, MIB, 3 * MIB // 2]))
            array[:: 64 * KIB] = seed
            if set(array[:: 64 * KIB].tolist()) != {seed}:
                wrong.append(seed)

    for done in [aside(lambda n=n: work(n)) for n in range(4)]:
        done.result(scaled(60))
    assert wrong == []
    assert bytes_lent(pool) == 0
    assert 0 < pool.free_bytes <= 8 * MIB


def test_the_disk_reads_into_the_pool(tmp_path: Path) -> None:
    pool = Slabs(10 * MIB)
    disk = Disk(str(tmp_path), pool)
    stored = disk.write([some(10).data, some(MIB).data])
    small, large = disk.read(stored)
    assert (small.tobytes(), large.tobytes()) == (some(10).tobytes(), some(MIB).tobytes())
    assert bytes_lent(pool) == MIB
    where = large.ctypes.data
    del large
    assert disk.read(stored)[1].ctypes.data == where
    disk.close()


# ---- mounts


def mounts(folder: Path, kind: str, source: str = "server:/export") -> str:
    return MOUNTS.format(tmp=folder, kind=kind, source=source)


NOTES |= {"fuse.sshfs": "a program serves (fuse.sshfs on {tmp})", "tmpfs": "is in memory (tmpfs on {tmp})"}


@pytest.mark.parametrize("kind", NOTES)
def test_notes_on_a_poor_file_system_name_it(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = notes(str(tmp_path / "not" / "there yet"), 0, mounts(tmp_path, kind))
    assert note.startswith(f"local_directory='{tmp_path}/not/there yet' is ")
    assert NOTES[kind].format(kind=kind, tmp=tmp_path) in note and "on a disk of this node" in note
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert notes(None, 0, mounts(tmp_path, kind))[0].startswith(f"local_directory='{tmp_path}' (TMPDIR) is ")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "fuseblk"])
def test_notes_on_a_disk_warn_of_little_room_only(tmp_path: Path, kind: str) -> None:
    assert notes(str(tmp_path), 1, mounts(tmp_path, kind)) == ()
    (note,) = notes(str(tmp_path), 2**60, mounts(tmp_path, kind))
    assert " free" in note and "1024.0 PiB" in note and "stay in host memory" in note
    assert len(notes("/dev/shm", 2**60)) == 2


def test_the_innermost_mount_counts(tmp_path: Path) -> None:
    local = tmp_path / "node local"
    local.mkdir()
    (tmp_path / "link").symlink_to(local)
    text = mounts(tmp_path, "nfs4")
    assert notes(str(local), 0, text) == notes(str(tmp_path / "link"), 0, text) == ()
    assert len(notes(str(tmp_path / "node"), 0, text)) == 1
    assert mount_of("/elsewhere", text) == Mount("/", "ext4", "/dev/vda1")
    assert mount_of(f"{tmp_path}xy", text) == Mount("/", "ext4", "/dev/vda1")
    assert mount_of("/x", "") is None
    assert mount_of("/x", "22 1 254:0 /\n - ext4\nnonsense\n") is None


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"local_directory='.*/file/x' cannot hold the files .*/file is not a folder"):
        notes(str(tmp_path / "file" / "x"))


def test_a_folder_that_may_not_be_written_is_an_error() -> None:
    """Root may write everywhere: a child that is somebody else asks."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o555)

        def look() -> None:
            with pytest.raises(ConfigError, match=f"{folder} is not writable"):
                notes(f"{folder}/x")

        as_neighbour(look) if os.geteuid() == 0 else look()


@pytest.fixture
def idle_store(stored: NewStore) -> GpuSpillBuffer:
    """A store that keeps 20 MiB of unused buffers, and 2 MiB of data."""
    store = stored(0, 300 * MIB)
    assert not store.fast  # then distributed takes the memory for not managed, and does not call evict
    room = store.disk.slabs.empty(20 * MIB)
    room[:] = 1
    del room
    assert store.fast
    store["kept"] = np.ones(2 * MIB, "u1")
    assert store.idle_bytes == 20 * MIB
    return store


def test_under_pressure_idle_memory_goes_before_data_does(idle_store: GpuSpillBuffer) -> None:
    assert idle_store.evict() == -1
    assert idle_store.settle(scaled(10))
    assert (idle_store.idle_bytes, idle_store.tiers["disk"]) == (0, 0)
    assert idle_store.evict() == -1  # distributed asks again if that was not enough
    assert idle_store.settle(scaled(10))
    assert idle_store.tiers["disk"] >= 2 * MIB
    idle_store["kept"]
    assert not idle_store.idle_bytes
    idle_store.above_target = lambda: 100 * MIB  # the process is large for other reasons: the request ends
    idle_store.evict()
    assert idle_store.settle(scaled(10))
    assert (idle_store.idle_bytes, idle_store.tiers["host"]) == (0, 0)


def test_an_eighth_of_the_host_tier_is_kept_as_idle_buffers(stored: NewStore, monkeypatch: Any) -> None:
    """Else what the tier counts, with what it does not, would be twice its limit."""
    monkeypatch.setattr(spill_thread, "_FREE_S", 0.0)
    store = stored(0, 100 * MIB)
    lent = [store.disk.slabs.empty(MIB) for _ in range(50)]
    assert store.settle(scaled(10))
    assert store.disk.slabs._held_bytes == 50 * MIB
    del lent[2:]
    assert store.settle(scaled(10))
    assert store.idle_bytes <= store.host_limit_bytes / 8
    assert store.disk.slabs._held_bytes >= 2 * MIB + store.host_limit_bytes // 8 - MIB


def test_data_and_unused_buffers_keep_the_host_tiers_limit(stored: NewStore) -> None:
    """Whatever Dask's monitors of memory do: nothing here asks for memory."""
    store = stored(0, 100 * MIB)
    lent = [store.disk.slabs.empty(MIB) for _ in range(50)]
    lent.clear()
    assert store.idle_bytes == 50 * MIB
    for i in range(12):
        store[i] = np.full(4 * MIB, i, "u1")
    assert store.settle(scaled(10))
    assert store.tiers["host"] == 48 * MIB
    assert store.tiers["host"] + store.idle_bytes <= store.host_limit_bytes
    assert [int(store[i][-1]) for i in range(12)] == list(range(12))


@pytest.mark.parametrize("stays", [0.0, 0.5], ids=["all that goes is freed", "half of it is not given back"])
def test_one_request_brings_the_process_down_to_its_target(stored: NewStore, stays: float) -> None:
    """As distributed's own store: from ``spill`` down to ``target``; in between there is no other request."""
    store = stored(0, None)
    for i in range(20):
        store[i] = np.full(MIB, i, "u1")
    most = 50 * MIB + sum(store.tiers.values())

    def process_bytes() -> float:
        return most - (1 - stays) * store.tiers["disk"]

    target = 0.9 * most
    store.above_target = lambda: int(process_bytes() - target)
    store.evict()
    assert store.settle(scaled(30))
    assert target - MIB <= process_bytes() <= target
    on_disk = store.tiers["disk"]
    store.evict()  # the look comes before the memory is measured anew
    assert store.settle(scaled(10))
    assert store.tiers["disk"] == on_disk


def test_moves_to_disk_under_pressure_leave_no_buffers(idle_store: GpuSpillBuffer) -> None:
    """Else the process would be as big as before, and more would go to disk, and more."""
    store = idle_store
    store.trim()
    for i in range(5):
        store[i] = store.disk.slabs.empty(4 * MIB)
    before = resident_bytes()
    for i in range(5):
        store[i][:] = i
    assert resident_bytes() - before > 15 * MIB
    while store.tiers["host"]:
        store.evict()
        assert store.settle(scaled(10))
    assert (store.idle_bytes, store.disk.slabs._held_bytes) == (0, 0)
    assert resident_bytes() - before < 10 * MIB
    assert [int(store[i][-1]) for i in range(5)] == list(range(5))


def test_kernel_short_of_memory_gets_idle_memory_only(idle_store: GpuSpillBuffer) -> None:
    short, looked = threading.Event(), threading.Semaphore(0)

    def is_short() -> bool:
        looked.release()
        return short.is_set()

    idle_store.host_is_short = is_short
    assert idle_store.settle(scaled(10))
    for _ in range(2):  # at once, and again by itself
        assert looked.acquire(timeout=scaled(60))
    assert idle_store.idle_bytes == 20 * MIB
    short.set()
    assert idle_store.settle(scaled(10))
    assert (idle_store.idle_bytes, idle_store.tiers["disk"]) == (0, 0)


# --- no two objects overlap, the limit holds, free room goes back


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


FILE_SYSTEMS = {"no holes": FileSystem(reserves=True), "no fallocate": FileSystem()}
FILE_SYSTEMS["holes"] = FileSystem(reserves=True, makes_holes=True)


@pytest.fixture(params=FILE_SYSTEMS)
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(segments, "_fallocate", FILE_SYSTEMS[request.param])
    return str(request.param)


# ---- free room


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 2)), max_size=60))
def test_free_extents_are_what_was_added_and_not_taken(steps: list[tuple[int, bool, int]]) -> None:
    """Beside a text with a 1 for each free page: what is there is found, and what touches is one."""
    free, text = Extents(), "0" * 200 + "|" + "0" * 100  # of the files "a" and "b"
    taken = [Extent("a", 0, 200 * PAGE_BYTES), Extent("b", 0, 100 * PAGE_BYTES)]

    def span(extent: Extent) -> slice:
        start = extent.start // PAGE_BYTES + 201 * (extent.file == "b")
        return slice(start, start + extent.nbytes // PAGE_BYTES)

    for pages, gives, which in steps:
        got = None if gives else free.take(pages * PAGE_BYTES)
        assert gives or (got is not None) == ("1" * pages in text)
        if gives and taken:
            back = taken.pop(which % len(taken))
            at, length = span(back), back.nbytes // PAGE_BYTES
            text = text[: at.start] + "1" * length + text[at.stop :]
            whole = span(free.add(back))
            assert "1" not in text[whole.start - 1 : whole.start] + text[whole.stop : whole.stop + 1]
            assert text[whole] == "1" * (whole.stop - whole.start)
        elif got:
            taken.append(got)
            assert text[span(got)] == "1" * pages
            text = text[: span(got).start] + "0" * pages + text[span(got).stop :]
        assert free.nbytes == text.count("1") * PAGE_BYTES
    free.take_file("a")
    assert free.nbytes == text[201:].count("1") * PAGE_BYTES


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
    small = [disk.write([some(PAGE_BYTES, i).data]) for i in range(250)]
    with pytest.raises(OSError, match=r"the files would exceed 1.0 MiB .*max-spill"):
        disk.write([some(20 * KIB).data])
    kept = small[::2]
    del small
    given = [some(n, i) for i, n in enumerate((1, 70 * KIB, 0, 300_001))]
    large = disk.write([g.data for g in given])
    assert len(large.slot) > 10
    assert contents(disk, large) == [g.tobytes() for g in given]
    assert [contents(disk, s) for s in kept] == [[some(PAGE_BYTES, i).tobytes()] for i in range(0, 250, 2)]
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
            said, taken = store.tiers["disk"], on_disk(store.disk.folder)
            assert said <= taken <= min(said + max(said / 8, MIB) + said / 64 + 2 * PAGE_BYTES, 20e6)
            for key in [key for key in store if rng.random() < part]:
                del store[key]
            assert store.settle()
        assert on_disk(store.disk.folder) == store.tiers["disk"] == 0
        store.close()


def test_room_that_is_used_again_soon_is_not_given_back(stored: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = FileSystem(reserves=True, makes_holes=True)
    monkeypatch.setattr(segments, "_fallocate", counting)
    monkeypatch.setattr(spill_thread, "_FREE_S", 3600.0)
    store = stored(0, "1MB", quiet=True)
    put(store, range(20), lambda i: np.full(MIB, i, "u1"))
    before = on_disk(store.disk.folder)
    for i in range(10):
        del store[i]
    assert store.settle()
    assert on_disk(store.disk.folder) == before
    assert store.disk.has_excess
    put(store, range(20, 30), lambda i: np.full(MIB, i, "u1"))
    assert on_disk(store.disk.folder) <= before + MIB
    assert counting.holes == 0


def test_without_holes_files_get_shorter_from_their_ends(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_fallocate", FileSystem())
    there = [disk.write([some(MIB, i).data]) for i in range(10)]
    del there[8]
    shrink(disk)  # finds out
    del there[2:]
    shrink(disk)
    assert on_disk(disk.folder) == 2 * MIB
    there += [disk.write([some(MIB, i).data]) for i in range(2, 4)]
    assert [disk.read(s)[0].tobytes() for s in there] == [some(MIB, i).tobytes() for i in range(4)]


def test_not_each_object_that_goes_makes_a_hole(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = FileSystem(reserves=True, makes_holes=True)
    monkeypatch.setattr(segments, "_fallocate", counting)
    there = [disk.write([memoryview(bytes(10 * KIB))]) for _ in range(1000)]
    for _ in range(500):
        there.pop(300)
        shrink(disk)
    assert 0 < counting.holes < 20


def test_a_file_that_refuses_a_hole_is_left_alone(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segments, "_fallocate", FileSystem(reserves=True, error=errno.EIO))
    there = [disk.write([some(MIB, i).data]) for i in range(10)]
    del there[5:]
    shrink(disk)
    assert caplog.text.count("cannot be given back") == 1
    there.append(disk.write([some(MIB, 5).data]))
    assert [disk.read(s)[0].tobytes() for s in there] == [some(MIB, i).tobytes() for i in range(6)]
    assert len({piece.file.path for s in there for piece in s.slot}) == 2
    del there[:5]
    shrink(disk)
    assert on_disk(disk.folder) <= 2 * MIB


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


SMALL |= {"_AT_ONCE": 4, "_KEPT_OPEN": 3}


class RoomInAnyOrder(RuleBasedStateMachine):
    """Room is taken, given back and trimmed in any order, on any file system, with a limit or without."""

    @initialize(kind=st.sampled_from(sorted(FILE_SYSTEMS)), limit=st.sampled_from([0, 3 * MIB]))
    def start(self, kind: str, limit: int) -> None:
        self.patch = mock.patch.multiple(segments, _fallocate=FILE_SYSTEMS[kind], **SMALL)
        self.patch.start()
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
            self.patch.stop()


TestRoom = RoomInAnyOrder.TestCase
TestRoom.settings = settings(deadline=None, max_examples=40, stateful_step_count=15)


@mock.patch.multiple(segments, **SMALL)
def test_threads_share_the_room_while_it_is_trimmed(tmp_path: Path) -> None:
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
