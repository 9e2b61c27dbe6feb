"""What a checkpoint costs: beside dd, beside Zarr without compression, and beside a pickle of the result.

One JSON line per figure; medians of ``--runs`` runs, in which all take turns on new workers. It needs
``pip install zarr submitit``.

``write``
    GiB/s of arrays in the workers' memory, until ``flush`` returns; of dd with ``conv=fsync``, as many bytes of zeros.
``wall_s``, ``cpu_s``
    Seconds, and CPU seconds of all processes. The round trip is to write an array that is in the workers' memory, and
    to read it into their memory: from the page cache, which hpcgpu itself has emptied of all but the last 40 MiB of a
    file, so it reads from the disk. What does not sync by itself has a sync(2) behind the last write.
    The way of submitit is one pickle, by the process that has the result: the client, into whose memory it is read. The
    job is the main job's tall SVD, of which one factor is kept, until it is there.
``synced_s``
    The job, until the factor is on the disk, too.
``late_ms``
    How late the workers' event loops were at most, while writing, while idle for as long, and while idle beside as many
    other processes that write such segments; without the time in which they waited for a core (``schedstat``). A
    virtual machine whose disk writes is not run for a while (steal in ``/proc/stat``): in the first and the last.
``grown_mib``
    How much a worker's resident memory grew at most while writing.
"""
# ruff: noqa: D103

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import _figures
import dask.array as da
import numpy as np
import psutil
from _job import QUIET, tree_cpu_s
from dask import config
from distributed import Client, LocalCluster, Worker, wait

from hpcgpu import Checkpoint
from hpcgpu.checkpoint.segments import Chunk, SegmentWriter

MIB = 2**20
WORKERS, BLOCK_MIB = 2, 16
COLUMNS, BLOCK_ROWS = 100, 10_000  # as _sizes.py: the tall SVD
LOOK_S = 0.002


def blocks(mib: int) -> Any:
    """Return a persisted array of random numbers."""
    length = BLOCK_MIB * MIB // 8
    x = da.random.default_rng(1).random((mib // BLOCK_MIB, length), chunks=(1, length)).persist()
    wait(x)
    return x


async def watch(dask_worker: Worker) -> None:
    """Begin to look how late the loop is, and how large the process."""
    process = psutil.Process()
    first = process.memory_info().rss
    dask_worker.extensions["seen"] = seen = {"late_ms": 0.0, "grown_mib": 0.0}

    async def look() -> None:
        while dask_worker.extensions.get("seen") is seen:
            due = time.perf_counter() + LOOK_S - core_wait_s()
            await asyncio.sleep(LOOK_S)
            seen["late_ms"] = max(seen["late_ms"], (time.perf_counter() - core_wait_s() - due) * 1e3)
            seen["grown_mib"] = max(seen["grown_mib"], (process.memory_info().rss - first) / MIB)

    dask_worker.extensions["look"] = asyncio.create_task(look())


def core_wait_s() -> float:
    """Return for how long this thread has waited for a core so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def seen(dask_worker: Worker) -> dict[str, float]:
    return dask_worker.extensions.pop("seen")


def most(client: Client) -> dict[str, float]:
    """Return what the workers have seen, the most of all."""
    answers = list(client.run(seen).values())
    return {name: max(answer[name] for answer in answers) for name in answers[0]}


def dd(client: Client, folder: Path, mib: int) -> dict[str, float]:
    began = time.perf_counter()
    argv = ["dd", "status=none", "if=/dev/zero", f"of={folder}/file", "bs=8M", f"count={mib // 8}", "conv=fsync"]
    subprocess.run(argv, check=True)
    return {"write": mib / 1024 / (time.perf_counter() - began)}


def apart(client: Client, folder: Path, mib: int) -> dict[str, float]:
    """Look at idle workers while other processes write."""
    argv = [sys.executable, __file__, "--apart", str(folder), str(mib // WORKERS)]
    writers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(WORKERS)]
    for writer in writers:
        writer.stdout.readline()
    client.run(watch)
    for writer in writers:
        writer.stdin.close()
    for writer in writers:
        writer.wait()
    return {"late_ms": most(client)["late_ms"]}


def write_apart(folder: Path, mib: int) -> None:
    """Be such a process: write when stdin is closed."""
    frames = [memoryview(np.random.default_rng(i).bytes(BLOCK_MIB * MIB)) for i in range(mib // BLOCK_MIB)]
    print("ready", flush=True)
    sys.stdin.read()
    segments = SegmentWriter(folder)
    for i, frame in enumerate(frames):
        segments.append(Chunk("apart", (i,)), [frame])
    segments.sync()


def written(client: Client, folder: Path, mib: int) -> dict[str, float]:
    """Look at the workers while they write, and as long again while they are idle."""
    x = blocks(mib)
    client.run(watch)
    began = time.perf_counter()
    with Checkpoint(folder, client) as it:
        it.persist(x, name="x")
        assert it.flush()
        took_s = time.perf_counter() - began
        writing = most(client)
        client.run(watch)
        time.sleep(took_s)
        return {"write": mib / 1024 / took_s, **writing, "idle": most(client)["late_ms"]}


def checkpoint(client: Client, folder: Path, mib: int) -> dict[str, float]:
    def there_and_back(x: Any) -> Any:
        with Checkpoint(folder, client) as it:
            it.persist(x, name="x")
            assert it.flush()
            return it.load("x").persist()

    return measured(there_and_back, mib)


def zarr(client: Client, folder: Path, mib: int) -> dict[str, float]:
    da.ones(WORKERS, chunks=1).to_zarr(str(folder / "first.zarr"))  # imports it

    def there_and_back(x: Any) -> Any:
        x.to_zarr(str(folder / "x.zarr"), compressors=None)
        os.sync()
        return da.from_zarr(str(folder / "x.zarr")).persist()

    return measured(there_and_back, mib)


def pickled(client: Client, folder: Path, mib: int) -> dict[str, float]:
    from submitit.core.utils import cloudpickle_dump, pickle_load

    def there_and_back(x: Any) -> Any:
        cloudpickle_dump(("success", x.compute()), folder / "result.pkl")
        os.sync()
        return pickle_load(folder / "result.pkl")

    return measured(there_and_back, mib)


def measured(there_and_back: Callable[[Any], Any], mib: int) -> dict[str, float]:
    x = blocks(mib)
    cpu, began = tree_cpu_s(), time.perf_counter()
    result = there_and_back(x)
    if isinstance(result, da.Array):
        wait(result)
    return {"wall_s": time.perf_counter() - began, "cpu_s": tree_cpu_s() - cpu}


def job(client: Client, folder: Path, mib: int, *, writes: bool) -> dict[str, float]:
    rows = mib * MIB // (8 * COLUMNS) // BLOCK_ROWS * BLOCK_ROWS
    u, _, _ = da.linalg.svd(da.random.default_rng(1).random((rows, COLUMNS), chunks=(BLOCK_ROWS, COLUMNS)))
    cpu, began = tree_cpu_s(), time.perf_counter()
    with Checkpoint(folder, client) as it:
        u = it.persist(u, name="u") if writes else u.persist()
        wait(u)
        out = {"wall_s": time.perf_counter() - began}
        it.flush()
        synced = {"synced_s": time.perf_counter() - began} if writes else {}
        return {**out, **synced, "cpu_s": tree_cpu_s() - cpu}


CASES: dict[tuple[str, str], Callable[[Client, Path, int], dict[str, float]]] = {
    ("write", "dd"): dd,
    ("write", "idle, others write"): apart,
    ("write", "hpcgpu"): written,
    ("round trip", "hpcgpu"): checkpoint,
    ("round trip", "zarr"): zarr,
    ("round trip", "pickle"): pickled,
    ("job", "with a checkpoint"): partial(job, writes=True),
    ("job", "without"): partial(job, writes=False),
}
UNITS = {"write": "GiB/s", "late_ms": "ms", "grown_mib": "MiB"}


@contextmanager
def workers(parent: Path) -> Iterator[tuple[Client, Path]]:
    """Start workers that have been used, and a folder; whatever was written before is on the disk."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    options = {"n_workers": WORKERS, "threads_per_worker": 1, "dashboard_address": None}
    with config.set(QUIET), LocalCluster(**options) as cluster, Client(cluster) as client:
        blocks(WORKERS * BLOCK_MIB).sum().compute()
        with Checkpoint(folder / "first", client) as it:
            it.persist(da.ones(WORKERS, chunks=1), name="x").compute()
        os.sync()
        yield client, folder / "run"
    shutil.rmtree(folder)


def main() -> None:
    if sys.argv[1:2] == ["--apart"]:
        write_apart(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--mib", type=int, default=1024, help="how much to write")
    args = parser.parse_args()
    figures: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for _ in range(args.runs):
        for (case, who), call in random.sample(list(CASES.items()), len(CASES)):
            with workers(args.folder) as (client, folder):
                folder.mkdir(mode=0o700)
                for measure, value in call(client, folder, args.mib).items():
                    if measure == "idle":
                        figures["write", "idle", "late_ms"].append(value)
                    else:
                        figures[case, who, measure].append(value)
    for (case, who, measure), values in sorted(figures.items()):
        _figures.report("checkpoint", f"{case}, {args.mib} MiB", who, measure, values, UNITS.get(measure, "s"))


if __name__ == "__main__":
    main()
