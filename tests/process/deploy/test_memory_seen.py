"""The memory of workers: how it is trimmed and allocated, and that monitors leave out that of simulated GPUs."""

from __future__ import annotations

import ctypes
import json
import os
import re
from pathlib import Path

import pytest
import ranks
from distributed import Client, Worker

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
    ("own", "env"),
    [
        ({}, {}),
        ({"MALLOC_TRIM_THRESHOLD_": str(GIB)}, {}),
        ({}, {"MALLOC_TRIM_THRESHOLD_": "1000000000", "MALLOC_MMAP_THRESHOLD_": str(32 * MIB)}),
    ],
    ids=["default", "environment", "worker's environment"],
)
def test_the_thresholds_of_glibc_are_in_force(
    own: dict[str, str], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what glibc does in the forked worker, not by what its environment says."""
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with LocalGPUCluster(gpus="sim:1", env=env) as cluster, Client(cluster) as client:
        assert list(client.run(is_mapped).values()) == [not env]  # first: later the heap may have room
        [kept] = client.run(heap_left).values()
        assert (kept > 16 * MIB) == bool(own or env)
        [threshold] = client.run(lambda: os.environ["MALLOC_TRIM_THRESHOLD_"]).values()
        assert threshold == {**{"MALLOC_TRIM_THRESHOLD_": "65536"}, **own, **env}["MALLOC_TRIM_THRESHOLD_"]


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


# Fills the simulated GPU (400 MiB, in a worker whose memory_limit is 250 MB) and lets the monitors look at it.
FILL = """
    import json, pathlib
    from hpcgpu import sim
    c = Client()
    pid = c.run(os.getpid)

    def fill(dask_worker):
        import numpy as np
        gpu = sim.current_gpu()
        dask_worker.kept = [gpu.asarray(np.ones(50 << 20, "u1")) for _ in range(8)]
        return gpu.used_bytes, dask_worker.monitor.proc.memory_info().rss, dask_worker.monitor.get_process_memory()

    used, rss, measured = next(iter(c.run(fill).values()))

    async def look(dask_worker):
        import asyncio
        for _ in range(20):  # the monitors look every 100 ms
            await asyncio.sleep(0.1)
            dask_worker.memory_manager.memory_monitor and await dask_worker.memory_manager.memory_monitor(dask_worker)
        return dask_worker.status.name

    status = next(iter(c.run(look).values()))
    facts = dict(used=used, rss=rss, measured=measured, status=status, same=c.run(os.getpid) == pid,
                 limit=next(iter(c.scheduler_info()["workers"].values()))["memory_limit"])
    pathlib.Path(sys.argv[1]).write_text(json.dumps(facts))
"""


def test_a_full_simulated_gpu_neither_pauses_nor_terminates(tmp_path: Path) -> None:
    path = ranks.script(tmp_path, FILL)
    done = ranks.run(path, str(tmp_path / "facts"), options=("--gpus", "sim:1x450MiB", "--memory-limit", "250MB"))
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "facts").read_text())
    assert facts["used"] == 400 << 20
    assert facts["rss"] > facts["limit"] > facts["measured"] > 0
    assert (facts["status"], facts["same"]) == ("running", True)
    assert not re.search("Pausing|Restarting|memory budget", done.stderr)


def test_a_host_full_of_memory_is_still_terminated(tmp_path: Path) -> None:
    code = """
        import queue
        c, news = Client(), queue.Queue()
        before = list(c.scheduler_info()["workers"])
        c.subscribe_topic("all", lambda event: news.put(event[1]))
        f = c.submit(lambda: (bytearray(400 << 20), time.sleep(60)), retries=0)
        while (event := news.get())["action"] != "add-worker":
            continue
        print("another worker" if event["worker"] not in before else "the same")
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:1x64MiB", "--memory-limit", "300MB"))
    assert done.stdout == "another worker\n", done.stderr
    assert "exceeded 95% memory budget" in done.stderr
