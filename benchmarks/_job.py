"""One case on one cluster, in a process of its own: ``main_job.py`` starts it, and looks at its memory from outside.

It is run by ``python -c``: a file that is run itself is imported again by each worker that multiprocessing spawns, and
so would be in the memory of LocalCluster's.
Prints ``begin`` when the cluster is there and idle, and ``end`` with its figures as JSON; then it closes the cluster.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from dataclasses import replace
from typing import Any

import dask
import psutil
from _sizes import ALL_FITS, IDLE, MONITORED, SIZES, Size
from distributed import Client, LocalCluster

IDLE_S, IDLE_WORKERS, POLL_S = 3.0, 8, 0.02
TARGET = 0.6  # distributed's, of memory_limit: where its spilling begins, and ours
# Dask's watch over the whole process is off: with limits as small as these the interpreter is much of what it sees.
OFF = {f"distributed.worker.memory.{name}": False for name in ("spill", "pause", "terminate")}
QUIET = {"logging.distributed": "critical"}
PLACES = {"hpcgpu": "sim", "hpcgpu, host arrays": "host", "LocalCluster": "host"}  # others: gpu


def cluster(who: str, protocol: str, size: Size, folder: str) -> Any:
    """Start a cluster of one kind. As many bytes of data fit into the workers' memory in all kinds."""
    secure: dict[str, Any] = {"protocol": protocol, "security": True} if protocol == "tls" else {"protocol": protocol}
    device_limit = int(0.8 * size.device_bytes)
    # the peer's one tier holds what our two hold
    one_tier = int(device_limit / TARGET) + size.host_bytes
    if who in ("LocalCluster", "LocalCUDACluster"):
        kept = {"local_directory": folder, "dashboard_address": None, "silence_logs": logging.CRITICAL, **secure}
        if who == "LocalCluster":
            return LocalCluster(n_workers=size.workers, threads_per_worker=1, memory_limit=one_tier, **kept)
        from dask_cuda import LocalCUDACluster

        share = size.workers / gpus()
        limits = {
            "device_memory_limit": int(share * device_limit),
            "memory_limit": int(share * TARGET * size.host_bytes),
        }
        return LocalCUDACluster(**limits, **kept)
    from hpcgpu import LocalGPUCluster

    ours: dict[str, Any] = {"dashboard": False, "quiet": True, "local_directory": folder, "protocol": protocol}
    if who == "hpcgpu, GPU":
        share = size.workers / gpus()
        limits = {"device_memory_limit": int(share * device_limit), "memory_limit": int(share * size.host_bytes)}
        return LocalGPUCluster(**limits, **ours)
    limit = one_tier if who == "hpcgpu, host arrays" else size.host_bytes
    return LocalGPUCluster(gpus=f"sim:{size.workers}x{size.device_bytes}", memory_limit=limit, **ours)


def gpus() -> int:
    """Return how many GPUs there are."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetCount())


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and all below it, those that have ended included."""
    this, out = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            out += sum(process.cpu_times()[:4])
    return out


def run(name: str, client: Client, size: Size, place: str) -> dict[str, Any]:
    """Run a case between the two marks, after a first time."""
    if name == IDLE:
        mark("begin")
        time.sleep(IDLE_S)
        return {}
    import _cases  # and with it dask.array, which is not to be in the memory of a scheduler without work

    client.run(_cases.prepare, name, place)
    client.run_on_scheduler(_cases.prepare, name, "host" if place == "gpu" else place)
    _cases.prepare(name, "host" if place == "gpu" else place)
    case = _cases.CASES[name.removesuffix(ALL_FITS).removesuffix(MONITORED)]
    began = time.perf_counter()
    case(client, size, place)
    first_wall_s = time.perf_counter() - began
    while any(client.run(_cases.keys).values()):
        time.sleep(POLL_S)
    was_moved = moved(client)
    mark("begin")
    before, began = tree_cpu_s(), time.perf_counter()
    result = case(client, size, place)
    wall_s, cpu_s = time.perf_counter() - began, tree_cpu_s() - before
    now_moved = moved(client)
    found = {direction: nbytes - was_moved[direction] for direction, nbytes in now_moved.items()}
    return {"result": result, "wall_s": wall_s, "first_wall_s": first_wall_s, "cpu_s": cpu_s, "moved": found}


def moved(client: Client) -> dict[str, int]:
    """Return the bytes that all workers have moved so far, by direction."""
    import _cases

    out: dict[str, int] = {}
    for worker in client.run(_cases.moved).values():
        for direction, nbytes in worker.items():
            out[direction] = out.get(direction, 0) + nbytes
    return out


def mark(word: str, figures: dict[str, Any] | None = None) -> None:
    print(f"\n{word} {json.dumps(figures or {})} .", flush=True)


def main() -> None:
    who, protocol, name, size_name, folder = sys.argv[1:]
    size = SIZES[size_name]
    if name == IDLE and size_name != "smallest":
        size = replace(size, workers=IDLE_WORKERS)
    if name.endswith(ALL_FITS):
        size = size.all_fits()
    with (
        # the scheduler of LocalCluster, too, has its files there
        dask.config.set({**({} if name.endswith(MONITORED) else OFF), **QUIET, "temporary-directory": folder}),
        cluster(who, protocol, size, folder) as it,
        Client(it) as client,
    ):
        client.wait_for_workers(size.workers if PLACES.get(who) else gpus())
        mark("end", run(name, client, size, PLACES.get(who, "gpu")))
