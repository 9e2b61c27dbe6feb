"""Requests to all workers of a cluster: their bindings, their memory, and to trim it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distributed import Client, Security, Worker
from distributed.core import clean_exception
from distributed.protocol.pickle import dumps, loads

from hpcgpu.deploy.dashboard.worker_metrics import collect
from hpcgpu.errors import ConfigError, message_of
from hpcgpu.host import host_memory
from hpcgpu.model.worker_names import by_number
from hpcgpu.report.workers import Bindings, Memory, WorkerFacts


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
    return client.sync(read_bindings, client.scheduler)


def bindings_at(address: str, tls: dict[str, str]) -> Bindings:
    """Return the bindings of the cluster at an address; ``tls`` are arguments of Security."""
    try:
        with Client(address, security=Security(**tls) if tls else None) as client:
            return bindings(client)
    except OSError as e:
        why = f"no scheduler answers at {address}: {message_of(e)}"
        raise ConfigError(f"{why}; give its address, and --tls-... for tls") from e


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
    return client.sync(read_memory, client.scheduler)


def trim_memory(client: Client) -> Any:
    """Have all workers collect garbage and give free memory back to the kernel.

    glibc keeps freed memory that lies below memory in use. Dask shows it as unmanaged memory of the process.
    ``malloc_trim(0)`` returns whole pages of it; jemalloc's ``purge`` does if jemalloc is loaded. Workers keep free
    blocks of up to 4 MiB (``MALLOC_MMAP_THRESHOLD_``) and 16 MiB of the heap's end (``MALLOC_TRIM_THRESHOLD_``). glibc
    reads these before ``main`` only: they are set for the fork server, and what ``env=`` has for workers by mallopt(3).

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
    return client.sync(trim, client.scheduler)


async def read_bindings(scheduler: Any) -> Bindings:  # distributed's rpc
    """Ask the workers of a scheduler for their bindings; raise ConfigError if hpcgpu has not started one."""
    facts = await _collect(scheduler)
    if other := next((w for w in facts if w.spec is None), None):
        raise ConfigError(
            f"worker {other.name} was not started by hpcgpu, which has planned no binding for it; "
            "bindings() asks workers of SLURMGPUCluster, PBSGPUCluster, LocalGPUCluster and 'hpcgpu launch'"
        )
    return Bindings(facts)


async def read_memory(scheduler: Any) -> Memory:
    """Ask the workers of a scheduler for their memory; raise ConfigError if one has no spill store."""
    facts = await _collect(scheduler)
    if other := next((w for w in facts if not w.tiers), None):
        raise ConfigError(
            f"worker {other.name} has a store for its data that does not count bytes by tier; "
            "memory() asks workers of hpcgpu, or with data=(hpcgpu.spill.GpuSpillBuffer, {...})"
        )
    return Memory(facts)


async def trim(scheduler: Any) -> dict[str, int]:
    """Have the workers of a scheduler trim their memory; return the freed bytes by name."""
    return dict(sorted(await _ask_all(scheduler, _trim), key=lambda answer: by_number(answer[0])))


async def _collect(scheduler: Any) -> tuple[WorkerFacts, ...]:
    return tuple(sorted(await _ask_all(scheduler, collect), key=lambda w: by_number(w.name)))


async def _ask_all(scheduler: Any, function: Callable[[Worker], Any]) -> list[Any]:
    """Return the results of all workers; raise the first error."""
    answers = list((await ask(scheduler, function)).values())
    for error in (answer for answer in answers if isinstance(answer, Exception)):
        raise error
    return answers


async def ask(scheduler: Any, function: Callable[[Worker], Any] = collect) -> dict[str, Any]:
    """Call a function in all workers of a scheduler; return results, or exceptions, by address."""
    message = {"op": "run", "function": dumps(function), "args": dumps(()), "kwargs": dumps({}), "wait": True}
    answers: dict[str, Any] = {}
    for address, answer in (await scheduler.broadcast(msg=message, on_error="return_pickle")).items():
        if isinstance(answer, bytes):
            answers[address] = loads(answer)  # an error of the connection
        else:
            answers[address] = answer["result"] if answer["status"] == "OK" else clean_exception(**answer)[1]
    return answers


async def _trim(dask_worker: Worker) -> tuple[str, int]:
    from hpcgpu.spill import GpuSpillBuffer  # 45 CPU ms, which only a worker has paid already

    # in a thread, since it takes a moment for each GB, in which the worker must answer
    def trim() -> int:
        if isinstance(dask_worker.data, GpuSpillBuffer):
            dask_worker.data.trim()
        return host_memory.trim()

    return str(dask_worker.name), await asyncio.to_thread(trim)
