"""Clusters in this process, whose workers have the store; and the values that tests give them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, Scheduler, Security, Worker

from hpcgpu import sim
from hpcgpu.deploy.processes.worker_plugin import SpillPlugin
from hpcgpu.sim import SimArray
from hpcgpu.spill import GpuSpillBuffer

KIB = 1024


@asynccontextmanager
async def cluster(
    folder: Path, *, plugin: bool, memory_limit: str | int = 0, jit_unspill: bool = False, protocol: str = "tcp"
) -> AsyncIterator[tuple[Client, Worker, Worker]]:
    """Two workers whose limits are a fraction of what the tests give them, unless distributed is to watch over them."""
    host = None if memory_limit else "600KiB"
    limits = {"device_memory_limit": 400 * KIB, "memory_limit": host, "local_directory": str(folder)}
    limits["jit_unspill"] = jit_unspill
    async with AsyncExitStack() as stack:
        # it removes copies from either worker, every 2 s, and tests say what lies where
        stack.enter_context(dask.config.set({"distributed.scheduler.active-memory-manager.start": False}))
        where: dict[str, Any] = {"security": Security.temporary()} if protocol in ("tls", "wss") else {}
        where |= {} if protocol == "inproc" else {"host": "127.0.0.1"}
        scheduler = await stack.enter_async_context(
            Scheduler(protocol=f"{protocol}://", port=0, dashboard_address="127.0.0.1:0", **where)
        )
        workers = []
        for name in "ab":
            work = str(folder.with_name(folder.name + "-work"))
            options = {"name": name, "nthreads": 2, "dashboard": False, "memory_limit": memory_limit, **where}
            options |= {"data": (GpuSpillBuffer, limits), "plugins": [SpillPlugin(None)] if plugin else []}
            worker = Worker(scheduler.address, local_directory=work, **options)
            workers.append(await stack.enter_async_context(worker))
            if not plugin:
                stack.callback(worker.data.close)
        client = Client(scheduler.address, asynchronous=True, security=where.get("security"))
        yield await stack.enter_async_context(client), *workers


def make(i: int) -> SimArray:
    return sim.asarray(np.full(100 * KIB, i, "u1"))


def kinds(*args: Any, **kwargs: Any) -> list[str]:
    """The names of the types of all arguments, in lists and dicts, too."""
    out = []
    for x in (*args, *kwargs.values()):
        if type(x) in (list, tuple):
            out += kinds(*x)
        elif type(x) is dict:
            out += kinds(**x)
        else:
            out.append(type(x).__name__)
    return out


def moved(*workers: Worker) -> dict[str, int]:
    return {name: sum(w.data.counters[name].nbytes for w in workers) for name in workers[0].data.counters}
