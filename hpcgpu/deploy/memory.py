"""The memory of a cluster's workers: asked of them, as a table for people, and given back to the kernel."""

from __future__ import annotations

import asyncio
import html
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

from distributed import Client, Worker
from distributed.diagnostics import nvml

from hpcgpu.deploy.report import by_number
from hpcgpu.errors import ConfigError
from hpcgpu.host import allocator
from hpcgpu.plan.views import memory_table
from hpcgpu.plan.views.memory_table import Moved, WorkerMemory


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of all workers of a cluster; a table in a terminal and in a notebook."""

    workers: tuple[WorkerMemory, ...]

    @property
    def total(self) -> WorkerMemory:
        """The sum of all workers."""
        return memory_table.total(self.workers)

    def __str__(self) -> str:
        return memory_table.render(self.workers)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def memory(client: Client) -> Any:  # noqa: ANN401 - a coroutine from an asynchronous client
    """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

    Parameters
    ----------
    client : Client
        Of a cluster whose workers have the spill store: hpcgpu's own, or others with it.

    Returns
    -------
    Memory
        It prints as a table, ``.workers`` has the numbers; an awaitable of it where the client is asynchronous.

    Raises
    ------
    ConfigError
        A worker has no spill store.

    """
    return client.sync(_memory, client)


def trim_memory(client: Client) -> Any:  # noqa: ANN401
    """Have all workers collect garbage and give free memory back to the kernel.

    glibc keeps what was freed below something that is still in use, and shows it as unmanaged memory of the
    process; ``malloc_trim(0)`` returns whole pages of it, and jemalloc's ``purge`` does where that is loaded. Workers
    start with ``MALLOC_TRIM_THRESHOLD_=65536`` (distributed's own default) unless the variable is set: then glibc
    returns by itself what is free at the end of the heap. It reads the variable before ``main`` only, so that it
    stands in the environment of the image from which workers are forked; a value that only workers get (``env=``)
    is set by mallopt(3), in each.

    Parameters
    ----------
    client : Client
        Of any cluster whose workers can import hpcgpu.

    Returns
    -------
    dict of str to int
        Bytes by which each worker's resident memory has become smaller, by its name; an awaitable of it where the
        client is asynchronous.

    """
    return client.sync(_trim_memory, client)


async def _memory(client: Client) -> Memory:
    facts = await client.run(_facts)
    return Memory(tuple(sorted(facts.values(), key=lambda w: by_number(w.name))))


async def _trim_memory(client: Client) -> dict[str, int]:
    answers = (await client.run(_trim)).values()
    return dict(sorted(answers, key=lambda answer: by_number(answer[0])))


async def _trim(dask_worker: Worker) -> tuple[str, int]:
    from hpcgpu.spill import GpuSpillBuffer  # 45 CPU ms, which only a worker has paid already

    # in a thread, since it takes a moment for each GB: the worker must go on answering
    def trim() -> int:
        if isinstance(dask_worker.data, GpuSpillBuffer):
            dask_worker.data.trim()
        return allocator.trim()

    return str(dask_worker.name), await asyncio.to_thread(trim)


def _facts(dask_worker: Worker) -> WorkerMemory:
    from hpcgpu.spill import GpuSpillBuffer

    store = dask_worker.data
    if not isinstance(store, GpuSpillBuffer):
        raise ConfigError(
            f"worker {dask_worker.name} has a {type(store).__name__} for its data, which does not say what lies where; "
            "memory() asks workers of hpcgpu, or with data=(hpcgpu.spill.GpuSpillBuffer, {...})"
        )
    tiers, spilled = store.tiers, store.spilled_total.disk
    immovable_number, immovable_bytes = store.immovable
    device = _device(dask_worker)
    return WorkerMemory(
        name=str(dask_worker.name),
        device_managed_bytes=tiers["device"],
        device_used_bytes=device.used_bytes,
        device_limit_bytes=store.device_limit_bytes or device.limit_bytes,
        device_capacity_bytes=device.capacity_bytes,
        device_source=device.source,
        host_managed_bytes=tiers["host"] + store.copy_bytes,
        process_bytes=dask_worker.monitor.get_process_memory(),
        host_limit_bytes=dask_worker.memory_manager.memory_limit or None,
        spilled_to_host_bytes=max(0, spilled - tiers["disk"]),
        spilled_to_disk_bytes=tiers["disk"],
        moved={way: Moved(c.nbytes, c.number, c.seconds) for way, c in store.counters.items()},
        rescues=store.rescues,
        immovable_number=immovable_number,
        immovable_bytes=immovable_bytes,
        allocator=allocator.in_force(),
    )


class _Device(NamedTuple):
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    limit_bytes: int | None = None
    source: str = ""


def _device(worker: Worker) -> _Device:
    """Return what is known of the worker's device; no CUDA context is made for it."""
    spec = getattr(worker.plugins.get("hpcgpu"), "spec", None)
    if spec is not None and spec.gpu is None:
        return _Device()
    capacity = spec.device_memory_bytes or None if spec else None
    limit = spec.device_memory_limit_bytes or None if spec else None
    sim = sys.modules.get("hpcgpu.sim") if spec is None or spec.simulated else None
    if sim:
        gpu = sim.current_gpu()
        return _Device(gpu.used_bytes, gpu.memory_bytes, limit, "simulated")
    cupy = sys.modules.get("cupy")
    if cupy and (pool := cupy.get_default_memory_pool()).total_bytes():
        return _Device(pool.used_bytes(), capacity or cupy.cuda.runtime.memGetInfo()[1], limit, "pool")
    if nvml.device_get_count():
        return _Device(nvml.real_time()["memory-used"], capacity or nvml.one_time()["memory-total"], limit, "NVML")
    return _Device(None, capacity, limit)
