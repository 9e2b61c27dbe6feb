"""The disk tier, the room in its files, the pool of host buffers, and warnings about a folder."""

from __future__ import annotations

import gc
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spill_stores import NewStore
from waiting import aside, scaled

from hpcgpu.errors import ConfigError
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.storage import Mount, mount_of, notes, segments
from hpcgpu.spill.storage.buffer_pool import SMALLEST_BYTES, Slabs, round_up
from hpcgpu.spill.storage.disk import Disk, Stored
from hpcgpu.spill.store import spill_thread

KIB, MIB = 2**10, 2**20


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


def test_what_may_not_lie_on_disk_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = GpuSpillBuffer(memory_limit=10 * MIB, target=0.4, max_spill="3.5 MiB", local_directory=str(tmp_path))
    try:
        for i in range(10):
            store[i] = some(MIB, i)
        store.settle()
        assert 3 * MIB <= store.tiers["disk"] <= 3.5 * MIB
        assert store.tiers["host"] == 7 * MIB
        assert all(np.array_equal(store[i], some(MIB, i)) for i in range(10))
    finally:
        store.close()
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


@pytest.mark.parametrize("kind", ["fallocate", "no fallocate"])
def test_short_writes_and_refused_ones_lose_nothing(tmp_path: Path, kind: str) -> None:
    """A limit of the kernel on files that are longer already: the fifth object is written in part, then refused."""
    argv = [sys.executable, "-c", LIMITED, str(tmp_path), kind]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60))
    assert done.stdout == "File too large 4\nFile too large\nTrue\n", done.stderr


# ---- slabs


@given(st.integers(1, 2**40))
def test_buffers_are_whole_pages_and_an_eighth_too_large_at_most(nbytes: int) -> None:
    size = round_up(nbytes)
    assert size % 4096 == 0
    assert nbytes <= size < max(nbytes * 9 / 8, nbytes + 4096)
    assert round_up(size) == size
    assert len({round_up(n) for n in range(nbytes, 2 * nbytes, nbytes // 99 + 1)}) <= 9


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
    assert (pool.used_bytes, pool.free_bytes) == (0, 2 * MIB)
    assert {pool.empty(MIB).ctypes.data for _ in range(3)} <= {where, *[a.ctypes.data for a in [pool.empty(MIB)]]}


def test_the_pool_is_bounded() -> None:
    pool = Slabs(3 * MIB)
    lent = [pool.empty(MIB) for _ in range(5)]
    assert pool.used_bytes == 3 * MIB
    assert [len(a) for a in lent] == [MIB] * 5
    lent.clear()
    assert (pool.free_bytes, pool.used_bytes) == (3 * MIB, 0)
    other = pool.empty(2 * MIB)  # another size: what is free makes room for it
    assert (pool.free_bytes, pool.used_bytes) == (MIB, 2 * MIB)
    assert pool.empty(SMALLEST_BYTES - 1).size == SMALLEST_BYTES - 1
    assert pool.used_bytes == other.nbytes


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
    assert (pool.free_bytes, pool.used_bytes, pool.trim()) == (0, 0, 0)


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
    assert pool.used_bytes == 0


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
    assert pool.used_bytes == 0
    assert 0 < pool.free_bytes <= 8 * MIB


def test_the_disk_reads_into_the_pool(tmp_path: Path) -> None:
    pool = Slabs(10 * MIB)
    disk = Disk(str(tmp_path), pool)
    stored = disk.write([some(10).data, some(MIB).data])
    small, large = disk.read(stored)
    assert (small.tobytes(), large.tobytes()) == (some(10).tobytes(), some(MIB).tobytes())
    assert pool.used_bytes == MIB
    where = large.ctypes.data
    del large
    assert disk.read(stored)[1].ctypes.data == where
    disk.close()


# ---- mounts

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
25 22 0:22 / /proc rw,nosuid shared:5 - proc proc rw
30 22 0:27 / {tmp} rw shared:9 - autofs systemd-1 rw,fd=32
31 30 0:51 / {tmp} rw,relatime shared:10 master:3 - {kind} {source} rw,vers=4.2
32 31 0:60 / {tmp}/node\\040local rw - xfs /dev/nvme0n1 rw
33 31 0:61 / {tmp}x rw - tmpfs none rw
"""


def mounts(folder: Path, kind: str, source: str = "server:/export") -> str:
    return MOUNTS.format(tmp=folder, kind=kind, source=source)


NETWORKS = ("nfs4", "nfs", "lustre", "gpfs", "beegfs", "cifs", "ceph")
NOTES = dict.fromkeys(NETWORKS, "is on a network file system ({kind}, server:/export on {tmp})")
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
    """Root may write everywhere: a child that is nobody asks."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    reading, writing = os.pipe()
    try:
        folder.chmod(0o555)
        child = os.fork()
        if child == 0:
            try:
                if os.geteuid() == 0:
                    os.setuid(65534)
                notes(str(folder / "x"))
            except ConfigError as e:
                os.write(writing, str(e).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert f"{folder} is not writable" in pipe.read()
        os.waitpid(child, 0)
    finally:
        folder.rmdir()


@pytest.fixture
def idle_store(tmp_path: Path) -> Iterator[GpuSpillBuffer]:
    """A store that keeps 20 MiB of unused buffers, and 2 MiB of data."""
    store = GpuSpillBuffer(0, 300 * MIB, str(tmp_path))
    assert not store.fast  # then distributed takes the memory for not managed, and does not call evict
    room = store.disk.empty(20 * MIB)
    room[:] = 1
    del room
    assert store.fast
    store["kept"] = np.ones(2 * MIB, "u1")
    assert store.idle_bytes == 20 * MIB
    yield store
    store.close()


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


def test_an_eighth_of_the_host_tier_is_kept_as_idle_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the tier counts, with what it does not, would be twice its limit."""
    monkeypatch.setattr(spill_thread, "_FREE_S", 0.0)
    store = GpuSpillBuffer(0, 100 * MIB, str(tmp_path))
    lent = [store.disk.empty(MIB) for _ in range(50)]
    assert store.settle(scaled(10))
    assert store.disk.slabs.held_bytes == 50 * MIB
    del lent[2:]
    assert store.settle(scaled(10))
    assert store.idle_bytes <= store.host_limit_bytes / 8
    assert store.disk.slabs.held_bytes >= 2 * MIB + store.host_limit_bytes // 8 - MIB
    store.close()


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
        store[i] = store.disk.empty(4 * MIB)
    before = resident_bytes()
    for i in range(5):
        store[i][:] = i
    assert resident_bytes() - before > 15 * MIB
    while store.tiers["host"]:
        store.evict()
        assert store.settle(scaled(10))
    assert (store.idle_bytes, store.disk.slabs.held_bytes) == (0, 0)
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
