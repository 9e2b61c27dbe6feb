"""A device object that counts its copies, and how many copies releasing spilled keys makes in a store of others.

Imports nothing of hpcgpu: ``spill.py`` also runs this file with the Python of an environment that has dask-cuda.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import dask
import numpy as np
from dask.sizeof import sizeof
from distributed import Client, LocalCluster, wait
from distributed.protocol import dask_deserialize, dask_serialize

KEYS, FIT, NBYTES = 40, 12, 2**20
copies = {"down": 0, "up": 0}


class Block:
    """As dask-cuda recognises device objects: by ``__cuda_array_interface__``; nothing reads through it."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}


@sizeof.register(Block)
def _size(block: Block) -> int:
    return block.host.nbytes


@dask_serialize.register(Block)
def _down(block: Block) -> tuple[dict[str, Any], list[memoryview]]:
    copies["down"] += 1
    return {}, [block.host.data]


@dask_deserialize.register(Block)
def _up(header: Mapping[str, Any], frames: list[Any]) -> Block:
    del header
    copies["up"] += 1
    return Block(np.frombuffer(frames[0], np.uint8))


def make(i: int) -> Block:
    return Block(np.full(NBYTES, i, np.uint8))


def released(data: Any, spilled: Callable[[Any], int], **limits: Any) -> int:
    """Return how many copies releasing 40 keys makes, of which 28 are spilled, in a worker with a store of others."""
    never = {f"distributed.worker.memory.{name}": False for name in ("spill", "pause", "terminate")}
    with (
        dask.config.set(never),
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", data=data, **limits
        ) as cluster,
        Client(cluster) as client,
    ):
        futures = client.map(make, range(KEYS), pure=False)
        wait(futures)
        store = next(iter(cluster.workers.values())).data
        if (there := spilled(store)) != KEYS - FIT:
            raise RuntimeError(f"{there} of {KEYS} keys are spilled, {KEYS - FIT} were to be")
        before = sum(copies.values())
        del futures
        while sum(client.run(lambda dask_worker: len(dask_worker.data)).values()):
            time.sleep(0.01)
        return sum(copies.values()) - before


def spill_buffer() -> int:
    """Return the figure for distributed's SpillBuffer (host to disk; it knows no devices)."""
    # target is a fraction of memory_limit; half a block more than fit
    with dask.config.set({"distributed.worker.memory.target": 0.5}):
        return released(None, lambda store: len(store.slow), memory_limit=(2 * FIT + 1) * NBYTES)


def dask_cuda() -> int:
    """Return the figure for dask-cuda's DeviceHostFile (device to host)."""
    from dask_cuda.device_host_file import DeviceHostFile

    settings = {"device_memory_limit": FIT * NBYTES + NBYTES // 2}
    return released((DeviceHostFile, settings), lambda store: len(store.host), memory_limit=0)


if __name__ == "__main__":
    print(json.dumps({"spill_buffer": spill_buffer, "dask_cuda": dask_cuda}[sys.argv[1]]()))
