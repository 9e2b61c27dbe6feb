"""The mean of a random array under each of Dask's schedulers, and on the GPUs of a cluster.

python examples/schedulers.py                           # two simulated GPUs, on this machine
python examples/schedulers.py --workers 1 2 4 --cupy    # real ones of this machine, through CuPy
hpcgpu run --gpus sim:4 examples/schedulers.py          # the last line: the cluster of the run
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask
import dask.array as da
from distributed import Client, LocalCluster

from hpcgpu import LocalGPUCluster
from hpcgpu.sim import asarray, register


def main() -> int:
    """Return 0 if all means are the same to 12 digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=40_000_000, help="numbers in the array")
    parser.add_argument("--chunk", type=int, default=1_000_000, help="numbers in a chunk")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="threads or processes, one line each")
    parser.add_argument("--cupy", action="store_true", help="real GPUs, through CuPy")
    options = parser.parse_args()
    x = da.random.default_rng(1).random(options.size, chunks=options.chunk)
    print(f"mean of {options.size:,} random numbers in {x.npartitions} chunks; seconds without the start of clusters")
    means = [timed("serial", partial(x.mean().compute, scheduler="synchronous"))]
    for scheduler in ("threads", "processes"):
        for n in options.workers:
            compute = partial(x.mean().compute, scheduler=scheduler, num_workers=n)
            means.append(timed(f"{scheduler}, {n}", compute))
    for n in options.workers:
        means.append(on_distributed(x, n))
    means.append(on_gpus(x, options.cupy))
    same = max(means) - min(means) <= 1e-12
    print("all means agree" if same else f"the means DIFFER: {means}")
    return 0 if same else 1


def timed(name: str, compute: Callable[[], Any]) -> float:
    """Print the time and the mean; return the mean."""
    start = time.perf_counter()
    mean = float(compute())
    print(f"{name:<22} {time.perf_counter() - start:7.3f} s   {mean:.15f}", flush=True)
    return mean


def on_distributed(x: da.Array, workers: int) -> float:
    """Compute on distributed's own cluster; with TLS, as hpcgpu's."""
    # ":0": any free port for the dashboard, as several clusters may run here
    settings = {"n_workers": workers, "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    with LocalCluster(**settings, security=True) as cluster, Client(cluster):
        return timed(f"distributed, {workers}", x.mean().compute)


def on_gpus(x: da.Array, cupy: bool) -> float:
    """Compute on GPUs: the chunks are made on the host, the means of them on the device."""
    if cupy:
        from cupy import asarray as to_device
    else:
        register()
        to_device = asarray
    with gpu_client(None if cupy else "sim:2") as client:
        workers = len(client.nthreads())
        return timed(f"hpcgpu, {workers} GPUs", x.map_blocks(to_device).mean().compute)


@contextmanager
def gpu_client(gpus: str | None) -> Iterator[Client]:
    """Connect to the cluster of ``hpcgpu run`` or ``hpcgpu launch``; without one, start one on this machine."""
    if dask.config.get("scheduler-address", None):
        with Client() as client:
            yield client
    else:
        with LocalGPUCluster(gpus=gpus) as cluster, Client(cluster) as client:
            yield client


if __name__ == "__main__":
    sys.exit(main())
