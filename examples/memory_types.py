"""The kinds of memory that a Dask cluster shows, live: arrays are made and spilled, something leaks, all is released.

python examples/memory_types.py                             # two simulated GPUs, on this machine
python examples/memory_types.py --cupy                      # real ones of this machine, through CuPy
hpcgpu run --gpus sim:2x64MiB examples/memory_types.py      # the workers of a run, with its limits

process = managed + unmanaged + recent: what the operating system says of the workers, the data that Dask knows, and
the rest, which counts as recent until it is older than a while (30 s; 4 s here). spilled: data below the tier in which
it is used. device, host, disk: where the workers' stores have what they hold. MiB, all workers together.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask
import dask.array as da
from distributed import Client, Scheduler, Worker, wait

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.sim import asarray, register

MIB = 2**20
COLUMNS = ("process", "managed", "unmanaged", "recent", "spilled", "device", "host", "disk")
RECENT_S = 4.0


def main() -> int:
    """Return 0 if the arrays were right after they had been spilled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=192, help="MiB of arrays")
    parser.add_argument("--leak", type=int, default=64, help="MiB that leak on each worker")
    parser.add_argument("--cupy", action="store_true", help="real GPUs, through CuPy")
    options = parser.parse_args()
    if options.cupy:
        from cupy import asarray as to_device
    else:
        register()
        to_device = asarray
    with gpu_client(options) as client:
        client.run_on_scheduler(age_quickly, RECENT_S)
        print(" " * 26 + "".join(f"{c:>10}" for c in COLUMNS))
        row(client, "idle")
        good = arrays(client, to_device, options.size)
        while sum(held(client).values()):
            time.sleep(0.05)
        row(client, "arrays released")
        later(client)  # so that the leak alone is recent
        client.run(leak, options.leak * MIB)
        row(client, "something leaked")
        later(client)
        client.run(stop_leaking)
        row(client, "leak freed")
        client.run(trim)
        row(client, "malloc_trim")
        hpcgpu.trim_memory(client)
        row(client, "trim_memory")
        print(f"spilled: {hpcgpu.memory(client).moved}")
        print("the arrays are right" if good else "the arrays are WRONG")
        return 0 if good else 1


def arrays(client: Client, to_device: Any, size_mib: int) -> bool:  # a function of a library
    """Make arrays on the devices, a quarter at a time, read them all, let go of them; return whether they are right."""
    quarters = []
    for i in range(4):
        numbers = da.arange(size_mib * MIB // 8 // 4, chunks=MIB // 2, dtype=float)  # 4 MiB
        quarters.append((numbers + i).map_blocks(to_device).persist())
        wait(quarters)
        settle(client)
        row(client, f"{i + 1} of 4 parts made")
    numbers_in_part = quarters[0].size
    expected = [numbers_in_part * (numbers_in_part - 1) / 2 + i * numbers_in_part for i in range(4)]
    found = [float(s) for s in dask.compute(*(q.sum() for q in quarters))]
    settle(client)
    row(client, "all of them read")
    return all(abs(f - e) <= 1e-9 * e for f, e in zip(found, expected, strict=True))


def row(client: Client, name: str) -> None:
    """Print the memory of all workers, after a heartbeat of each."""
    client.run(beat)
    memory = client.run_on_scheduler(memory_state)
    print(f"{name:<26}" + "".join(f"{(memory | held(client))[c] / MIB:10.0f}" for c in COLUMNS), flush=True)


def later(client: Client) -> None:
    """Wait until what is recent has become old, and print the memory again."""
    time.sleep(RECENT_S + 1)
    row(client, f"  {RECENT_S + 1:.0f} s later")


def held(client: Client) -> dict[str, int]:
    """Return the bytes in each tier of all workers' stores."""
    return dict(hpcgpu.memory(client).total.tiers)


async def beat(dask_worker: Worker) -> None:
    """Measure and tell the scheduler now; else both happen every half second or so."""
    dask_worker.monitor.update()
    await dask_worker.heartbeat()


def memory_state(dask_scheduler: Scheduler) -> dict[str, int]:
    """Return what the dashboard's bars show."""
    state = dask_scheduler.memory
    names = {"unmanaged": "unmanaged_old", "recent": "unmanaged_recent"}
    return {c: getattr(state, names.get(c, c)) for c in ("process", "managed", "unmanaged", "recent", "spilled")}


def age_quickly(seconds: float, dask_scheduler: Scheduler) -> None:
    """Do what distributed.worker.memory.recent-to-old-time does, in a running scheduler."""
    dask_scheduler.MEMORY_RECENT_TO_OLD_TIME = seconds


def settle(client: Client) -> None:
    """Wait until what is above the limits has been moved."""
    client.run(settled)


async def settled(dask_worker: Worker) -> None:
    """Wait in a thread: the event loop goes on."""
    import asyncio

    await asyncio.to_thread(dask_worker.data.settle)


def leak(nbytes: int) -> None:
    """Keep memory that nobody knows of, as a library does in a cache of its own."""
    import types

    library = sys.modules.setdefault("a_library", types.ModuleType("a_library"))
    library.__dict__["cache"] = bytearray(nbytes)


def stop_leaking() -> None:
    """Empty the cache."""
    sys.modules["a_library"].__dict__.clear()


def trim() -> int:
    """Let glibc give back what it keeps for later."""
    import ctypes

    return ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextmanager
def gpu_client(options: argparse.Namespace) -> Iterator[Client]:
    """Connect to the cluster of ``hpcgpu run`` or ``hpcgpu launch``; without one, start one on this machine."""
    if dask.config.get("scheduler-address", None):
        with Client() as client:
            yield client
    else:
        start = partial(LocalGPUCluster, device_memory_limit="32MiB")
        with start() if options.cupy else start(gpus="sim:2x128MiB") as cluster, Client(cluster) as client:
            yield client


if __name__ == "__main__":
    sys.exit(main())
