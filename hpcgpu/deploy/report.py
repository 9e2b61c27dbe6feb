"""Show a cluster's workers as tables: their bindings, their memory, and the bytes that they have spilled.

The workers' free memory is given back to the kernel from here, too.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from distributed import Client, Worker
from distributed.diagnostics import nvml

from hpcgpu.errors import ConfigError
from hpcgpu.host import allocator, bind
from hpcgpu.model import ActualBinding, WorkerSpec
from hpcgpu.plan.jobs.worker_names import by_number
from hpcgpu.plan.views import explain, memory_table, notebook
from hpcgpu.plan.views.memory_table import Moved, WorkerMemory
from hpcgpu.plan.views.notebook import WorkerView
from hpcgpu.units import format_bytes


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker's plan and its actual state."""

    spec: WorkerSpec
    actual: ActualBinding
    tiers: Mapping[str, int]  # bytes in each tier now
    moved: Mapping[str, int]  # bytes since the start, by direction

    @property
    def differences(self) -> tuple[str, ...]:
        """The differences of the process from its plan, as messages."""
        return explain.differences(self.spec, self.actual)


@dataclass(frozen=True, slots=True)
class Bindings:
    """The bindings of all workers of a cluster, planned and actual; a table in a terminal and in a notebook."""

    workers: tuple[WorkerFacts, ...]

    @property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """Differences from the plan, by the worker's name."""
        return {w.spec.name: w.differences for w in self.workers if w.differences}

    def __str__(self) -> str:
        table = explain.render_actual([w.spec for w in self.workers], [w.actual for w in self.workers])
        return f"{table}{self._verdict}\n"

    @property
    def _verdict(self) -> str:
        if wrong := self.differences:
            return f"{len(wrong)} of {len(self.workers)} workers not as planned"
        return "read back from the kernel: all threads are where they were planned"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        views = [WorkerView(w.spec.name, spec=w.spec, differences=w.differences) for w in self.workers]
        return notebook.bindings_page(views, self._verdict)


def bindings(client: Client) -> Any:  # a coroutine from an asynchronous client
    """Return each worker's binding, read back from the kernel now: threads, memory policy, environment.

    Parameters
    ----------
    client : Client
        Of a cluster whose workers hpcgpu has started.

    Returns
    -------
    Bindings
        An awaitable of it where the client is asynchronous.

    Raises
    ------
    ConfigError
        A worker was started by something else.

    """
    return client.sync(_bindings, client)


def workers(client: Client) -> tuple[WorkerFacts, ...]:
    """Return the facts of all workers of the client's cluster, in the order of their names."""
    found: Bindings = bindings(client)
    return found.workers


async def _bindings(client: Client) -> Bindings:
    facts = await client.run(_binding_facts)
    return Bindings(tuple(sorted(facts.values(), key=lambda f: by_number(f.spec.name))))


def _binding_facts(dask_worker: Worker) -> WorkerFacts:
    store, spec = dask_worker.data, getattr(dask_worker.plugins.get("hpcgpu"), "spec", None)
    if spec is None:
        raise ConfigError(
            f"worker {dask_worker.name} was not started by hpcgpu, which has planned no binding for it; "
            "bindings() asks workers of SLURMGPUCluster, PBSGPUCluster, LocalGPUCluster and 'hpcgpu launch'"
        )
    moved = {name: count.nbytes for name, count in store.counters.items()}
    env = tuple((name, os.environ[name]) for name, _ in spec.env if name in os.environ)
    return WorkerFacts(spec, replace(bind.read_binding(), env=env), dict(store.tiers), moved)


def worker_view(dask_worker: Worker) -> WorkerView:
    """Return a notebook's facts of a worker, which hpcgpu may not have started; called in the worker."""
    name, host = str(dask_worker.name), dask_worker.address.partition("://")[2].rpartition(":")[0]
    try:
        facts = _binding_facts(dask_worker)
    except ConfigError:
        return WorkerView(name, host)
    return WorkerView(name, host, facts.spec, _memory_facts(dask_worker), facts.differences)


def spilled(facts: tuple[WorkerFacts, ...]) -> dict[str, Any]:
    """Sum the bytes moved by all workers, by direction."""
    out: dict[str, int] = {}
    for worker in facts:
        for name, size in worker.moved.items():
            out[name] = out.get(name, 0) + size
    return out


def spill_line(moved: Mapping[str, int]) -> str:
    """Format the moves in one line."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in moved.items())


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
        return notebook.memory_page(self.workers, str(self))


def memory(client: Client) -> Any:  # a coroutine from an asynchronous client
    """Return the memory of each worker now: on the device, in the host, spilled, and the moves with their speed.

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


def trim_memory(client: Client) -> Any:
    """Have all workers collect garbage and give free memory back to the kernel.

    glibc keeps freed memory that lies below memory in use. Dask shows it as unmanaged memory of the process.
    ``malloc_trim(0)`` returns whole pages of it; jemalloc's ``purge`` does if jemalloc is loaded. Workers start with
    ``MALLOC_TRIM_THRESHOLD_=65536`` (distributed's own default) unless the variable is set: then glibc itself returns
    free memory at the end of the heap. glibc reads the variable before ``main`` only, so that it is set in the
    environment of the fork server; a value that only workers get (``env=``) is set in each by mallopt(3).

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
    facts = await client.run(_memory_facts)
    return Memory(tuple(sorted(facts.values(), key=lambda w: by_number(w.name))))


async def _trim_memory(client: Client) -> dict[str, int]:
    answers = (await client.run(_trim)).values()
    return dict(sorted(answers, key=lambda answer: by_number(answer[0])))


async def _trim(dask_worker: Worker) -> tuple[str, int]:
    from hpcgpu.spill import GpuSpillBuffer  # 45 CPU ms, which only a worker has paid already

    # in a thread, since it takes a moment for each GB, in which the worker must answer
    def trim() -> int:
        if isinstance(dask_worker.data, GpuSpillBuffer):
            dask_worker.data.trim()
        return allocator.trim()

    return str(dask_worker.name), await asyncio.to_thread(trim)


def _memory_facts(dask_worker: Worker) -> WorkerMemory:
    from hpcgpu.spill import GpuSpillBuffer

    store = dask_worker.data
    if not isinstance(store, GpuSpillBuffer):
        raise ConfigError(
            f"worker {dask_worker.name} has a {type(store).__name__} for its data, which does not count bytes by tier; "
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
    """Return the known facts of the worker's device, without making a CUDA context."""
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
