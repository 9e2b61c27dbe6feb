"""Copies through page-locked memory, and cuda.bindings and cuda.core on a stand-in for NVIDIA's driver."""

import gc
import itertools
import os
import sys
import threading
from pathlib import Path
from unittest import mock

import fake_cuda
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.cuda import CoreBuffers, device_of, is_device_array
from hpcgpu.spill.storage import pinned
from hpcgpu.spill.storage.disk import pipelined
from hpcgpu.spill.storage.pinned import CHUNK_BYTES, PinnedPool, is_pinned
from hpcgpu.spill.store.messages import register

MIB = 1 << 20


def pool_of(limit_bytes: int) -> PinnedPool:
    return PinnedPool(limit_bytes, lambda chunk: chunk[:: len(chunk) - 1].fill(0), lambda _: None)


def test_memory_is_lent_as_long_as_a_view_lives() -> None:
    pool = pool_of(MIB)
    array = pool.take(MIB)
    assert array is not None and array.nbytes == MIB and is_pinned(array)
    view = array[10:20]
    assert not is_pinned(view)  # the driver would copy a part only
    del array
    gc.collect()
    assert pool.take(MIB) is None
    del view
    assert pool.take(MIB) is not None


def test_pool_of_a_system_without_memory_tries_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, now_s = list[int](), [100.0]

    def lock(chunk: np.ndarray) -> None:
        calls.append(chunk.nbytes)
        if len(calls) == 2:
            raise MemoryError

    monkeypatch.setattr(pinned.time, "monotonic", lambda: now_s[0])
    pool = PinnedPool(4 * CHUNK_BYTES, lock, lambda _: None)
    one = pool.take(MIB)
    assert one is not None
    assert pool.take(CHUNK_BYTES) is pool.take(CHUNK_BYTES) is None
    assert (calls, pool._held_bytes) == ([CHUNK_BYTES] * 2, CHUNK_BYTES)
    assert pool.take(MIB) is not None  # there is room in what is locked
    now_s[0] += 1.1
    assert pool.take(CHUNK_BYTES) is not None


def test_a_buffer_of_many_chunks_is_copied_in_parts() -> None:
    """CUDA refuses a copy that spans two ranges, each registered by itself."""
    pool = pool_of(4 * CHUNK_BYTES)
    small, large = pool.take(MIB), pool.take(3 * CHUNK_BYTES - MIB)
    assert small is not None and large is not None
    assert pool.parts(small) == [slice(0, MIB)]
    ends = [CHUNK_BYTES - MIB, 2 * CHUNK_BYTES - MIB, 3 * CHUNK_BYTES - MIB]
    assert [part.stop for part in pool.parts(large)] == ends
    assert pool.take(CHUNK_BYTES) is not None and pool.take(1) is None


@pytest.mark.parametrize("nbytes", [1, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3, 8 * MIB])
def test_bytes_are_copied_by_several_threads(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(pinned, "_count", lambda: 3)
    threads, copy = set[str](), np.copyto

    def copy_and_note(*arrays: np.ndarray) -> None:
        threads.add(threading.current_thread().name)
        copy(*arrays)

    monkeypatch.setattr(pinned.np, "copyto", copy_and_note)
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    pinned.copy_bytes(target := np.zeros(nbytes, np.uint8), source)
    np.testing.assert_array_equal(target, source)
    assert (len(threads) > 1) == (nbytes >= 2 * MIB)


def test_a_kernel_without_huge_pages_locks_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned.mmap, "MADV_HUGEPAGE", 12345)  # EINVAL, as without CONFIG_TRANSPARENT_HUGEPAGE
    pool = pool_of(CHUNK_BYTES)
    array = pool.take(MIB)
    assert array is not None
    array[:] = 7
    assert pool.lock_ahead(CHUNK_BYTES) is False  # the limit


def test_chunks_are_locked_ahead_one_by_one() -> None:
    pool = pool_of(10 * CHUNK_BYTES)
    assert [pool.lock_ahead(3 * CHUNK_BYTES) for _ in range(4)] == [True, True, True, False]
    assert pool.free_bytes == 3 * CHUNK_BYTES
    taken = pool.take(2 * CHUNK_BYTES)
    assert pool.lock_ahead(3 * CHUNK_BYTES) and taken is not None
    assert pool.free_bytes == 2 * CHUNK_BYTES
    assert not pool_of(0).lock_ahead(1)


def test_a_child_has_no_locked_memory() -> None:
    """Else the first write after a fork would go to other pages than those that the GPU knows."""
    pool = pool_of(CHUNK_BYTES)
    array = pool.take(MIB)
    assert array is not None
    span = f"{array.ctypes.data:x}-{array.ctypes.data + CHUNK_BYTES:x}"
    assert span in Path("/proc/self/maps").read_text()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, b"there" if span in Path("/proc/self/maps").read_text() else b"gone")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 9) == b"gone"
    os.close(reader), os.close(writer)


@given(st.lists(st.tuples(st.sampled_from("ttttdddx"), st.integers(1, 3 * MIB)), max_size=40))
def test_the_pool_stays_within_its_limit(steps: list[tuple[str, int]]) -> None:
    locked: set[int] = set()

    def lock(chunk: np.ndarray) -> None:
        assert chunk.ctypes.data not in locked
        locked.add(chunk.ctypes.data)

    lent: list[np.ndarray] = []
    with mock.patch.object(pinned, "CHUNK_BYTES", MIB):
        pool = PinnedPool(5 * MIB + 8192, lock, lambda chunk: locked.remove(chunk.ctypes.data))
        for step, nbytes in steps:
            if step == "t":
                lent += [array for array in [pool.take(nbytes)] if array is not None]
            elif step == "x":
                pool.trim(nbytes)
            elif lent:
                lent.pop(nbytes % len(lent))
            taken = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in lent)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
            pages = sum(-(-a.nbytes // 4096) * 4096 for a in lent)
            assert pages + pool.free_bytes == pool._held_bytes <= 5 * MIB + 8192
            for begin, end in [(a.ctypes.data + p.start, a.ctypes.data + p.stop) for a in lent for p in pool.parts(a)]:
                assert any(chunk <= begin < end <= chunk + MIB for chunk in locked)
            assert all(sum(p.stop - p.start for p in pool.parts(a)) == a.nbytes for a in lent)
        lent.clear()
        gc.collect()
        assert pool.trim() >= 0
        assert (pool._held_bytes, pool.free_bytes, locked) == (0, 0, set())


@given(st.binary(max_size=500), st.integers(1, 100), st.integers(1, 4))
def test_a_stage_is_empty_before_it_is_filled_again(data: bytes, size: int, stages: int) -> None:
    """Like a device that delivers as late as it may: at ``start`` nothing is in the stage, only at ``finish``.

    The parts cover everything once.
    """
    source, target = np.frombuffer(data, np.uint8), np.zeros(len(data), np.uint8)
    under_way: dict[int, slice] = {}
    begun: list[int] = []
    most = 0

    def start(stage: int, part: slice) -> None:
        nonlocal most
        assert stage not in under_way
        under_way[stage] = part
        begun.extend(range(part.start, part.stop))
        assert part.stop - part.start <= size
        most = max(most, len(under_way))

    def finish(stage: int, part: slice) -> None:
        assert under_way.pop(stage) == part
        target[part] = source[part]

    pipelined(len(data), size, range(stages), start, finish)
    np.testing.assert_array_equal(target, source)
    assert begun == list(range(len(data)))
    assert not under_way
    assert most == min(stages, -(-len(data) // size))


def test_a_host_array_is_on_no_device() -> None:
    assert not is_device_array(np.zeros(3))
    assert device_of(np.zeros(3)) is None
    assert not is_device_array(memoryview(b"abc"))


def test_buffers_without_the_driver_say_what_to_install() -> None:
    class Other:
        memory_bytes = 0
        copies = None

    with pytest.raises(SpillError, match="cuda-core"):
        CoreBuffers(Other())  # type: ignore[arg-type]


def test_registering_imports_no_cupy() -> None:
    before = "cupy" in sys.modules  # true where a test on a GPU came first
    register()
    assert ("cupy" in sys.modules) == before


def test_what_the_store_asks_of_driver_and_cuda_core(tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", reason="no cuda.core here: it comes with the extra dev")
    # one child for all of them: a process has one driver, and most of the time is that of imports
    files = ["spill/test_cuda_api.py", "spill/test_cuda_standin.py"]
    assert fake_cuda.not_passed(tmp_path, files, "-n", "0") == []
