"""Memory as people see it: tables, trimming, the allocator, and what distributed itself shows as spilled."""

import asyncio
import logging
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from hypothesis import given
from hypothesis import strategies as st
from programs import python
from store_clusters import small_gpu

import hpcgpu
from hpcgpu import sim
from hpcgpu.errors import ConfigError
from hpcgpu.host import host_memory, process
from hpcgpu.report.workers import Memory, Moved, WorkerFacts, total
from hpcgpu.sim import SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.distributed.plugin import SpillPlugin
from hpcgpu.spill.preload import dask_setup
from hpcgpu.spill.store.inbox import Count
from hpcgpu.spill.store.reports import SpillLog

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WAYS = ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")


# the table


A = WorkerFacts(
    name="n-0",
    tiers={"device": 3 * GIB, "host": 2 * GIB, "disk": 7 * GIB},
    device_used_bytes=4 * GIB,
    device_limit_bytes=8 * GIB,
    device_capacity_bytes=10 * GIB,
    device_source="pool",
    process_bytes=5 * GIB,
    host_limit_bytes=16 * GIB,
    spilled_to_host_bytes=GIB,
    moved={"device_to_host": Moved(4_000_000_000, 40, 0.5)},
)
SIZES = st.integers(0, 1 << 50)
MOVED = st.builds(Moved, SIZES, st.integers(0, 10**6), st.floats(0, 1e6))
WORKERS = st.builds(
    WorkerFacts,
    name=st.text("abc-0123", min_size=1),
    device_source=st.sampled_from(["", "simulated", "pool", "NVML"]),
    moved=st.dictionaries(st.sampled_from(WAYS), MOVED),
    allocator=st.sampled_from(["system", "jemalloc 5.3.0"]),
    tiers=st.fixed_dictionaries(dict.fromkeys(("device", "host", "disk"), SIZES)),
    **{f.name: SIZES if f.type == "int" else st.none() | SIZES for f in fields(WorkerFacts) if "bytes" in f.name},
)
gpu = small_gpu
ALLOCATOR = """
from hpcgpu.host import host_memory
blocks = [bytes(16 << 10) for _ in range(8000)]
kept = blocks[::100]
del blocks
print(host_memory.in_force(), host_memory.trim() > 8 << 20)
"""
TIERS = {"device": 5 * MIB, "host": 2 * MIB, "disk": 0}


def test_the_table() -> None:
    lines = str(Memory((A, replace(A, name="n-1", device_limit_bytes=None)))).splitlines()
    titles = ["worker", "device: managed", "in use", "limit", "capacity", "host: managed"]
    assert re.split("  +", lines[0])[:6] == titles
    device, host = ["3.0 GiB", "4.0 GiB", "8.0 GiB", "10.0 GiB"], ["2.0 GiB", "3.0 GiB", "5.0 GiB", "16.0 GiB"]
    assert re.split("  +", lines[1]) == ["n-0", *device, *host, "1.0 GiB", "7.0 GiB"]
    # one worker's limit is unknown
    assert re.split("  +", lines[3])[:6] == ["all", "6.0 GiB", "8.0 GiB", "-", "20.0 GiB", "4.0 GiB"]
    assert "3.7 GiB in 40 (0.50 s, 8.00 GB/s)" in lines[6]
    assert "7.5 GiB in 80 (1.00 s, 8.00 GB/s)" in lines[8]
    assert lines[-1] == "managed: Dask's data; in use: arrays in the worker's CuPy pool; allocator: system"


def test_table_of_unusual_workers() -> None:
    assert "nothing has been moved\n" in str(Memory((replace(A, moved={}),)))
    assert not {"failed", "pickled"} & set(str(Memory((A,))).split())
    text = str(Memory((replace(A, rescues=2, immovable_number=1, immovable_bytes=3 * MIB),) * 2))
    assert "succeeded after data was moved: 4\n" in text
    assert "stay in memory (the log names their types): 2, 6.0 MiB\n" in text
    used = [total([replace(A, device_source=source)] * n).device_used_bytes for source, n in (("NVML", 2), ("NVML", 1))]
    assert used == [None, 4 * GIB], "a device that workers share is not counted twice"
    assert total([A] * 2).device_used_bytes == 8 * GIB
    apart = [replace(A, device_source="NVML", gpu=gpu) for gpu in ("G0", "G1")]
    assert total(apart).device_used_bytes == 8 * GIB, "devices of their own have a sum"


@given(st.lists(WORKERS, min_size=1, max_size=5))
def test_the_sum_is_the_sum_and_every_worker_has_a_row(workers: list[WorkerFacts]) -> None:
    summed = total(workers)
    for name in ("device_managed_bytes", "process_bytes", "spilled_to_disk_bytes"):
        assert getattr(summed, name) == sum(getattr(w, name) for w in workers)
    limits = [w.host_limit_bytes for w in workers]
    assert summed.host_limit_bytes == (None if None in limits else sum(x for x in limits if x is not None))
    assert summed.moved["host_to_disk"].number == sum(w.moved.get("host_to_disk", Moved()).number for w in workers)
    assert [row[0] for row in Memory(tuple(workers)).table.rows] == [*(w.name for w in workers), "all"]
    assert all(w.host_unmanaged_bytes <= w.process_bytes for w in workers)


# asked of workers


@asynccontextmanager
async def one_worker(folder: Path, *, store: bool = True) -> AsyncIterator[tuple[Client, Scheduler, Worker]]:
    limits = {"device_memory_limit": 400 * KIB, "memory_limit": "600KiB", "local_directory": str(folder)}
    async with AsyncExitStack() as stack:
        here = Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0")
        scheduler = await stack.enter_async_context(here)
        worker = Worker(
            scheduler.address,
            name="n-0",
            host="127.0.0.1",
            local_directory=str(folder),
            memory_limit="1GB",
            dashboard=False,
            **({"data": (GpuSpillBuffer, limits), "plugins": [SpillPlugin()]} if store else {}),
        )
        await stack.enter_async_context(worker)
        yield await stack.enter_async_context(Client(scheduler.address, asynchronous=True)), scheduler, worker


def make(i: int) -> SimArray:
    return sim.asarray(np.full(100 * KIB, i, "u1"))


async def test_a_worker_tells_what_lies_where(gpu: SimGpu, tmp_path: Path) -> None:
    async with one_worker(tmp_path) as (client, scheduler, worker):
        futures = client.map(make, range(12))
        await client.gather(client.map(type, futures))
        assert await asyncio.to_thread(worker.data.settle, 10)
        kept = make(99)  # on the device, and not Dask's
        found = await hpcgpu.memory(client)
        [w] = found.workers
        assert w.name == "n-0"
        assert w.device_source == "simulated"
        assert w.device_managed_bytes <= w.device_limit_bytes == 400 * KIB
        assert w.device_used_bytes == w.device_managed_bytes + kept.nbytes == gpu.used_bytes
        assert w.device_capacity_bytes == 16 * MIB
        data = 12 * 100 * KIB
        assert w.device_managed_bytes + w.spilled_to_host_bytes + w.spilled_to_disk_bytes == pytest.approx(data, 0.02)
        assert w.spilled_to_host_bytes > 0
        assert w.spilled_to_disk_bytes > 0
        assert w.host_limit_bytes == 10**9
        assert w.process_bytes > w.host_managed_bytes >= w.spilled_to_host_bytes
        down = w.moved["device_to_host"]
        assert (down.nbytes, down.number) == (gpu.d2h_bytes, gpu.d2h_copies)
        assert down.seconds > 0
        assert f"in {down.number} (" in str(found) == repr(found)
        assert found.total.device_managed_bytes == w.device_managed_bytes
        assert "<th>worker</th>" in found._repr_html_()
        # distributed's own words: the spill from the device is in them
        await worker.heartbeat()
        seen = scheduler.workers[worker.address].memory
        assert seen.spilled == w.spilled_to_host_bytes + w.spilled_to_disk_bytes
        del futures, kept


async def test_a_worker_without_the_store_says_so(tmp_path: Path) -> None:
    async with one_worker(tmp_path, store=False) as (client, _, __):
        with pytest.raises(ConfigError, match=r"worker n-0 has a .* data=\(hpcgpu.spill.GpuSpillBuffer"):
            await hpcgpu.memory(client)
        with pytest.raises(ConfigError, match="worker n-0 was not started by hpcgpu"):
            await hpcgpu.bindings(client)


# the allocator


def test_the_threads_that_pbs_sets_are_no_wish_of_the_users() -> None:
    """It gives every job OMP_NUM_THREADS, as many as it has cores (20-job-environment)."""
    job = {"PBS_JOBID": "7.login01", "NCPUS": "8", "OMP_NUM_THREADS": "8"}
    added = process.rank_env(job)
    assert added["OMP_NUM_THREADS"] == "1"
    (note,) = process.replaced(job | added, {})
    assert re.search("OMP_NUM_THREADS=8 .* each worker has 1 .env= changes it", note)
    assert process.replaced(job | added, {"OMP_NUM_THREADS": "8"}) == ()
    one = {**job, "NCPUS": "1", "OMP_NUM_THREADS": "1"}
    assert process.replaced(one | process.rank_env(one), {}) == ()
    assert process.user_env(job | added) == job
    for own in (job | {"OMP_NUM_THREADS": "4"}, {"NCPUS": "8", "OMP_NUM_THREADS": "8"}):
        assert "OMP_NUM_THREADS" not in process.rank_env(own)
        assert process.replaced(own | process.rank_env(own), {}) == ()


def test_a_users_threshold_of_glibc_is_alone() -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        assert "MALLOC_" not in str(process.rank_env({name: "0"}))
    assert process.rank_env({"MALLOC_TRIM_THRESHOLD_": "65536"}) == process.rank_env({})  # a LocalCluster's


def test_the_image_preloads_and_the_users_script_does_not() -> None:
    added = process.rank_env({"LD_PRELOAD": "theirs.so"}, "/lib/libjemalloc.so.2")
    assert added["LD_PRELOAD"] == "/lib/libjemalloc.so.2:theirs.so"
    assert process.user_env({"LD_PRELOAD": "theirs.so", **added}) == {"LD_PRELOAD": "theirs.so"}
    assert process.user_env({"A": "1", **process.rank_env({}, "/lib/libjemalloc.so.2")}) == {"A": "1"}
    assert "LD_PRELOAD" not in process.rank_env({"LD_PRELOAD": "theirs.so"})
    kept = {"LD_PRELOAD": "theirs.so"}
    assert process.user_env({**kept, **process.rank_env(kept)}) == kept


def test_jemalloc_is_looked_for_in_the_users_environment_first(tmp_path: Path) -> None:
    for name in ("conda", "module", "foreign"):
        (tmp_path / name / "lib").mkdir(parents=True)
    elf = Path(sys.executable).resolve().read_bytes()[:64]
    (tmp_path / "conda/lib/libjemalloc.so.2").write_bytes(elf)
    (tmp_path / "module/lib/libjemalloc.so.2").write_bytes(elf)
    (tmp_path / "foreign/lib/libjemalloc.so.2").write_bytes(elf[:18] + b"\xff\xff" + elf[20:])
    where = {"CONDA_PREFIX": str(tmp_path / "conda"), "EBROOTJEMALLOC": str(tmp_path / "module")}
    assert host_memory.find_jemalloc(where) == str(tmp_path / "conda/lib/libjemalloc.so.2")
    foreign = {"CONDA_PREFIX": str(tmp_path / "foreign"), "LD_LIBRARY_PATH": f":{tmp_path}/module/lib"}
    assert host_memory.find_jemalloc(foreign) == str(tmp_path / "module/lib/libjemalloc.so.2")
    assert "$CONDA_PREFIX/lib" in host_memory.NOT_FOUND


def test_jemalloc_is_in_force_and_is_purged() -> None:
    library = host_memory.find_jemalloc(os.environ)
    if not library:
        pytest.skip("no libjemalloc.so.2 here")
    env = {**os.environ, "LD_PRELOAD": library, "MALLOC_CONF": "dirty_decay_ms:-1"}
    done = python(ALLOCATOR, env=env, check=True)
    assert done.stdout.startswith("jemalloc 5.")
    assert done.stdout.endswith(" True\n")
    assert host_memory.in_force() == "system"


# the log


def counters(down: int = 0, disk: int = 0) -> dict[str, Count]:
    return {"device_to_host": Count(down * MIB, down, 0.1), "host_to_disk": Count(disk * MIB, disk, 0.1)}


def test_log_has_a_line_at_the_start_and_end_of_spilling() -> None:
    log = SpillLog(quiet_s=10)
    assert log.note(TIERS, counters(), 0.0) is None
    assert log.wait_s(0.0) is None
    begins = log.note(TIERS, counters(1), 1.0)
    assert begins == (
        "spilling begins: device to host 1.0 MiB in 1 move; now 5.0 MiB on device, 2.0 MiB on host, 0 B on disk"
    )
    assert log.note(TIERS, counters(1), 9.0) is None
    assert log.note(TIERS, counters(3, 2), 10.0) is None
    assert log.wait_s(12.0) == 8.0
    assert log.note(TIERS, counters(3, 2), 19.9) is None
    ended = log.note(TIERS, counters(3, 2), 20.0)
    assert ended is not None
    assert ended.startswith("spilling has ended after 9 s: device to host 3.0 MiB in 3 moves, host to disk 2.0 MiB in")
    assert log.wait_s(20.0) is None
    assert log.note(TIERS, counters(3, 2), 90.0) is None
    again = log.note(TIERS, counters(4, 2), 100.0)
    assert again is not None
    assert "device to host 1.0 MiB in 1 move;" in again


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=60))
def test_the_log_alternates_and_misses_no_move(steps: list[tuple[int, int]]) -> None:
    log, now_s, moves = SpillLog(quiet_s=10), 0, 0
    lines: list[tuple[int, str]] = []
    last_move_s = None
    for wait_s, number in steps:
        now_s, moves = now_s + wait_s, moves + number
        last_move_s = now_s if number else last_move_s
        if line := log.note(TIERS, counters(moves), now_s):
            lines.append((now_s, line))
    assert [line.startswith("spilling begins") for _, line in lines] == [i % 2 == 0 for i in range(len(lines))]
    assert bool(lines) == (moves > 0)
    if log.wait_s(now_s) is not None and last_move_s is not None:
        assert log.note(TIERS, counters(moves), last_move_s + 10) is not None
        lines.append((now_s, "spilling has ended"))
    assert len(lines) % 2 == 0


# a plain dask worker


def said_of(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    worker: Any = SimpleNamespace(local_directory=str(folder), name="w", data={}, plugins={})
    caplog.clear()
    with caplog.at_level(logging.WARNING, "distributed.worker.memory"):
        asyncio.run(dask_setup(worker))
    return caplog.text


def test_a_scratch_folder_that_others_can_change_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dask's default, if somebody else has made ``/tmp/dask-scratch-space`` before."""
    folder = tmp_path / "dask-scratch-space"
    folder.mkdir()
    assert "is not safe" not in said_of(folder, caplog)
    folder.chmod(0o777)
    assert f"the scratch folder of worker w is not safe, {folder}: every user of this node" in said_of(folder, caplog)
    assert "--local-directory" in caplog.text
