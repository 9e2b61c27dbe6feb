"""What the spill store costs, beside distributed's SpillBuffer, a dict, and dask-cuda's DeviceHostFile.

One JSON line per figure; ``runs`` says of how many runs it is the median.

``copies``
    Copies between tiers when 40 keys of which 28 are spilled are released. dask-cuda's class is imported here, or in
    the environment of ``--dask-cuda PYTHON``, and counted on objects that it takes for device objects.
``lag_p99_ms``, ``lag_max_ms``
    How late a coroutine on the worker's event loop that sleeps 2 ms again and again wakes up, while 40 arrays of
    64 MiB (2.7 GB) are made, or read, on a worker with one thread that may keep 500 MB in its upper tier.
``wall_s``
    How long that takes; making them includes the moves that are due at its end.
``set_us``, ``get_us``, ``del_us``
    CPU time of one ``data[key] = value``, ``data[key]`` or ``del data[key]``, in a store in which so many arrays of
    16 B, 4 KiB or 64 KiB are, none of them spilled; 10,000 calls, of which those of set and del are on new keys. The
    stores take turns in one process. A million arrays of 4 KiB take 6 GiB of memory.

The arrays are random numbers, so that nothing is gained by compressing them. Figures of a GPU need CuPy and a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import _figures
import _peers
import dask
import numpy as np
from _bookkeeping import figures as bookkeeping
from distributed import Client, LocalCluster, Worker, wait

import hpcgpu
from hpcgpu import LocalGPUCluster, sim
from hpcgpu.sim import register
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.distributed.plugin import SpillPlugin

MIB = 2**20
ARRAYS, ARRAY_BYTES, UPPER_BYTES = 40, 64 * MIB, 500_000_000
TICK_S = 0.002
MAKE, READ = f"make {ARRAYS} x 64 MiB", f"read {ARRAYS} x 64 MiB"
RELEASE = f"{_peers.KEYS} keys released, {_peers.KEYS - _peers.FIT} of them spilled"


def say(case: str, who: str, measure: str, values: list[float] | str, unit: str) -> None:
    """Print a figure; text in place of values says why there is none."""
    make = _figures.missing if isinstance(values, str) else _figures.figure
    print(json.dumps(make("spill", case, who, measure, values, unit)), flush=True)


def copies(runs: int, python: str | None) -> None:
    say(RELEASE, "hpcgpu, device to host", "copies", [our_copies() for _ in range(runs)], "copies")
    peers = {"SpillBuffer, host to disk": ("spill_buffer", sys.executable)}
    peers["dask-cuda, device to host"] = ("dask_cuda", python or sys.executable)
    for who, (name, program) in peers.items():
        say(RELEASE, who, "copies", peer_copies(program, name, runs), "copies")


def our_copies() -> int:
    # 12.7 blocks: the 13th sets the mover going, which stops below 95 % of the limit, that is at 12
    limit = int((_peers.FIT + 0.7) * _peers.NBYTES)
    with LocalGPUCluster(gpus="sim:1x1GiB", device_memory_limit=limit) as cluster, Client(cluster) as client:
        futures = client.map(make_block, range(_peers.KEYS), nbytes=_peers.NBYTES, pure=False)
        wait(futures)
        client.run(settled)
        before = moved(client)
        if before != (_peers.KEYS - _peers.FIT) * _peers.NBYTES:
            raise RuntimeError(f"{before} bytes are spilled, {_peers.KEYS - _peers.FIT} blocks were to be")
        del futures
        while sum(client.run(lambda dask_worker: len(dask_worker.data)).values()):
            time.sleep(0.01)
        return (moved(client) - before) // _peers.NBYTES


def make_block(i: int, nbytes: int) -> sim.SimArray:
    return sim.asarray(np.full(nbytes, i, np.uint8))


def moved(client: Client) -> int:
    return sum(way.nbytes for way in hpcgpu.memory(client).total.moved.values())


def peer_copies(python: str, name: str, runs: int) -> list[float] | str:
    values = []
    for _ in range(runs):
        argv = [python, "-W", "ignore", str(Path(__file__).with_name("_peers.py")), name]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            return f"not measured: {done.stderr.strip().splitlines()[-1]}"
        values.append(float(done.stdout))
    return values


class Store(NamedTuple):
    """A store under test: what the worker gets as ``data``, where its arrays live, and its settings."""

    data: Any
    place: str = "host"
    memory_limit: int = 0
    ours: bool = False


STORES: Mapping[str, Store] = {
    "dict": Store(dict),
    # target is set to 0.5
    "SpillBuffer, host to disk": Store(None, memory_limit=2 * UPPER_BYTES),
    # the store keeps below 0.6 of memory_limit
    "hpcgpu, host to disk": Store(
        (GpuSpillBuffer, {"device_memory_limit": 0, "memory_limit": int(UPPER_BYTES / 0.6)}), ours=True
    ),
    "dict, device arrays": Store(dict, "device"),
    "hpcgpu, device to host": Store((GpuSpillBuffer, {"device_memory_limit": UPPER_BYTES}), "device", ours=True),
}


GPU_STORES: Mapping[str, Store] = {
    "dict, GPU arrays": Store(dict, "gpu"),
    "hpcgpu, GPU to host": Store((GpuSpillBuffer, {"device_memory_limit": UPPER_BYTES}), "gpu", ours=True),
}


def loops(runs: int, stores: Mapping[str, Store]) -> None:
    found: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(runs):  # all of them in each run, so that a busy moment of the machine meets all
        for who, store in {**stores, **({} if why_no_gpu() else GPU_STORES)}.items():
            for (case, measure), value in one_loop(store).items():
                found.setdefault((case, who, measure), []).append(value)
    for (case, who, measure), values in found.items():
        say(case, who, measure, values, "s" if measure == "wall_s" else "ms")
    if why := why_no_gpu():
        for who in GPU_STORES:
            for measure in ("wall_s", "lag_p99_ms", "lag_max_ms"):
                say(MAKE, who, measure, why, "s" if measure == "wall_s" else "ms")


def why_no_gpu() -> str:
    """Return why there are no figures of a GPU; empty if there can be."""
    try:
        import cupy

        cupy.cuda.Device(0).use()
    except Exception as e:  # no CuPy, no driver, no device: each has an error of its own
        return f"not measured: {type(e).__name__}: {e}"
    return ""


def one_loop(store: Store) -> dict[tuple[str, str], float]:
    """Return make and read figures of one worker in a process of its own."""
    settings = {f"distributed.worker.memory.{name}": False for name in ("spill", "pause", "terminate")}
    settings["distributed.worker.memory.target"] = 0.5
    settings["logging.distributed"] = "critical"  # a worker that is told to close may complain of the scheduler's
    out = {}
    with (
        TemporaryDirectory() as folder,
        dask.config.set(settings),
        LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            memory_limit=store.memory_limit,
            data=store.data,
            local_directory=folder,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run(prepare)
        if store.ours:
            client.register_plugin(SpillPlugin(), name="hpcgpu")
        with Watch(client) as watch:
            arrays = client.map(make_array, range(ARRAYS), place=store.place, pure=False)
            wait(arrays)
            if store.ours:
                client.run(settled)
        out.update(watch.figures(MAKE))
        with Watch(client) as watch:
            firsts = client.gather(client.map(first_of, arrays, pure=False))
        out.update(watch.figures(READ))
        if firsts != [np.random.default_rng(i).random() for i in range(ARRAYS)]:
            raise RuntimeError("the arrays are not what was made")
    return out


def prepare() -> None:
    sim.set_current_gpu(sim.SimGpu(4096 * MIB))
    register()


def make_array(i: int, place: str) -> Any:  # an array of host or device
    host = np.random.default_rng(i).random(ARRAY_BYTES // 8)
    if place == "gpu":
        import cupy

        return cupy.asarray(host)
    return sim.asarray(host) if place == "device" else host


def first_of(array: Any) -> float:  # an array of host or device
    return float(array[0])


async def settled(dask_worker: Worker) -> None:
    if not await asyncio.to_thread(dask_worker.data.settle):
        raise TimeoutError("the store did not come to rest")


class Watch:
    """Measures how late the worker's event loop is, as long as it is entered."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __enter__(self) -> Watch:
        self.client.run(start_ticking, TICK_S)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self.start
        (self.late_s,) = self.client.run(stop_ticking).values()

    def figures(self, case: str) -> dict[tuple[str, str], float]:
        """Return the figures, by case and measure."""
        late = [1000 * s for s in sorted(self.late_s)]
        lags = {"lag_p99_ms": late[int(0.99 * len(late))], "lag_max_ms": late[-1]}
        return {(case, m): v for m, v in {"wall_s": self.wall_s, **lags}.items()}


async def start_ticking(every_s: float, dask_worker: Worker) -> None:
    late: list[float] = []

    async def tick() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(every_s)
            late.append(time.perf_counter() - start - every_s)

    dask_worker.benchmark = (late, asyncio.create_task(tick()))


async def stop_ticking(dask_worker: Worker) -> list[float]:
    late, task = dask_worker.benchmark
    await asyncio.sleep(0)  # a last tick that is late
    task.cancel()
    return late


def calls(runs: int) -> None:
    for (case, who, measure), values in bookkeeping(runs).items():
        say(case, who, measure, values, "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=("copies", "loops", "calls"), default=("copies", "loops", "calls"))
    parser.add_argument("--gpu-only", action="store_true", help="of the loops those on a GPU alone")
    parser.add_argument("--dask-cuda", metavar="PYTHON", help="Python of an environment with dask-cuda")
    options = parser.parse_args()
    if "copies" in options.only:
        copies(options.runs, options.dask_cuda)
    if "loops" in options.only:
        loops(options.runs, {} if options.gpu_only else STORES)
    if "calls" in options.only:
        calls(options.runs)


if __name__ == "__main__":
    main()
