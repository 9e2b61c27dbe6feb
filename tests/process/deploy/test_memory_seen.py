"""What people see of a cluster's memory, in processes of their own."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import fake_nvml
import pytest
import ranks
from distributed import Client, Worker
from fake_nvml import FakeGpu

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.host import allocator

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Mallinfo2(ctypes.Structure):
    """malloc.h: ten numbers, of which two are named: blocks that were mapped, and free bytes at the heap's end."""

    _fields_ = (
        *(("others", ctypes.c_size_t * 3), ("hblks", ctypes.c_size_t)),
        *(("more", ctypes.c_size_t * 5), ("keepcost", ctypes.c_size_t)),
    )


def glibc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = Mallinfo2
    return libc


def is_mapped(mib: int = 24) -> bool:
    """Return whether glibc maps a block of this size, in place of taking it from the heap."""
    libc = glibc()
    before = libc.mallinfo2().hblks
    block = libc.malloc(mib * MIB)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return bool(after > before)


def heap_left(mib: int = 32) -> int:
    """Fill the end of the heap, free it, and return what of it glibc has kept."""
    libc = glibc()
    blocks = [0] * (mib * MIB // (60 * KIB))  # a list that grows would itself lie between them, or above
    for i in range(len(blocks)):
        blocks[i] = libc.malloc(60 * KIB)
    for block in reversed(blocks):
        libc.free(block)
    return int(libc.mallinfo2().keepcost)


FRAGMENTS = 4000  # of 16 KiB: below the mmap threshold, so that they lie in the heap


def fragment() -> list[bytes]:
    """Leave a heap that is free but for its end, which glibc keeps."""
    blocks = [bytes(16 * KIB) for _ in range(FRAGMENTS)]
    return [blocks[-1], *blocks[:-1:100]]


def fill(dask_worker: Worker) -> None:
    dask_worker.left = fragment()


@pytest.mark.usefixtures("importable")
def test_trimming_gives_back_what_was_freed() -> None:
    with LocalGPUCluster(gpus="sim:2") as cluster, Client(cluster) as client:
        client.run(fill)
        given_back = cluster.trim_memory()
        names = [w.spec.name for w in cluster.bindings().workers]
        assert list(given_back) == names
        assert min(given_back.values()) > FRAGMENTS * 16 * KIB // 2
        again = hpcgpu.trim_memory(client)
        assert max(again.values()) < FRAGMENTS * 16 * KIB // 4
        memory = cluster.memory()
        assert [w.name for w in memory.workers] == names
        assert all(w.device_source == "simulated" and w.device_limit_bytes for w in memory.workers)


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("own", "env", "left"),
    [
        ({}, {}, False),
        ({"MALLOC_TRIM_THRESHOLD_": str(GIB)}, {}, True),
        ({}, {"MALLOC_TRIM_THRESHOLD_": "1000000000"}, True),
    ],
    ids=["default", "environment", "worker's environment"],
)
def test_the_trim_threshold_is_in_force(
    own: dict[str, str], env: dict[str, str], left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what glibc does in the forked worker, not by what its environment says."""
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with LocalGPUCluster(gpus="sim:1", env=env) as cluster, Client(cluster) as client:
        [kept] = client.run(heap_left).values()
        assert (kept > 16 * MIB) == left
        [said] = client.run(lambda: os.environ["MALLOC_TRIM_THRESHOLD_"]).values()
        assert said == {**{"MALLOC_TRIM_THRESHOLD_": "65536"}, **own, **env}["MALLOC_TRIM_THRESHOLD_"]


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    "env", [{}, {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB)}], ids=["default", "worker's environment"]
)
def test_the_mmap_threshold_is_in_force(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    with LocalGPUCluster(gpus="sim:1", env=env) as cluster, Client(cluster) as client:
        assert list(client.run(is_mapped).values()) == [not env]


NVIDIA_SCRIPT = """
    import hpcgpu, json
    with Client() as client:
        for w in hpcgpu.memory(client).workers:
            print(w.device_source, w.device_used_bytes, w.device_capacity_bytes >> 20, w.device_limit_bytes >> 20)
        print(hpcgpu.memory(client).total.device_used_bytes)
"""


def test_nvml_says_what_is_used_where_no_pool_does(tmp_path: Path) -> None:
    """The NVML is a fake, compiled here; nothing of its GPUs' memory is in use."""
    gpus = [FakeGpu(f"0000:{bus}:00.0", f"GPU-{bus}", size_mib=1024) for bus in ("06", "16")]
    (tmp_path / "nvml").mkdir()
    env = fake_nvml.compiled(tmp_path / "nvml").environment(gpus)
    done = ranks.run(ranks.script(tmp_path, NVIDIA_SCRIPT), options=(), env=env)
    assert done.stdout.splitlines() == ["NVML 0 1024 819", "NVML 0 1024 819", "None"], done.stderr


def test_the_workers_of_a_cluster_have_jemalloc() -> None:
    if not allocator.find_jemalloc(os.environ):
        pytest.skip("no libjemalloc.so.2 here")
    with LocalGPUCluster(gpus="sim:1", allocator="jemalloc") as cluster, Client(cluster):
        assert cluster.memory().total.allocator.startswith("jemalloc 5.")


def test_where_there_is_no_jemalloc_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocator, "find_jemalloc", lambda environ: "")  # a machine without it
    with LocalGPUCluster(gpus="sim:1", allocator="jemalloc") as cluster, Client(cluster):
        assert cluster.memory().total.allocator == "system"
    assert capfd.readouterr().err.count("no libjemalloc.so.2 in ") == 1
