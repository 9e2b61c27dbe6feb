"""Clusters in this process, whose workers have the store; the values that tests give them, and their paths."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, Security, Worker, get_client, get_worker, wait

from hpcgpu import sim
from hpcgpu.sim import SimArray, SimGpu, register
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.distributed.plugin import SpillPlugin
from hpcgpu.spill.proxies import is_proxy, source_of

KIB = 1024
# --- the paths on which values leave a worker, and what user code meets at their ends
N = 20


@pytest.fixture
def small_gpu() -> Iterator[SimGpu]:
    """Let this process have a simulated GPU."""
    before = sim.current_gpu()
    sim.set_current_gpu(made := SimGpu(16 << 20))
    register()
    yield made
    sim.set_current_gpu(before)


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
            options |= {"data": (GpuSpillBuffer, limits), "plugins": [SpillPlugin()] if plugin else []}
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


def make_any(i: int) -> Any:
    """One value of each kind that the store moves in a way of its own."""
    big, small = sim.asarray(np.full(100 * KIB, i, "u1")), sim.asarray(np.full(100, i, "u1"))
    host = np.full(100 * KIB, i, "u1")
    return (big, host, {"gpu": [big, small], "host": host}, small)[i % 4]


def look(*values: Any) -> list[Any]:
    """The number of each value; in its place what user code must not meet, which is looked at where this runs."""
    try:
        store = get_worker().data
    except ValueError:  # a client
        store = None
    return [_number(value, store) for value in values]


def _number(x: Any, store: Any) -> Any:
    if is_proxy(x):
        source: Any = source_of(x)
        if store is None or not store.jit_unspill or source.reader is not store._reader:
            return f"a proxy of {source.kind.__name__}"
        return int(x[-1])
    if type(x) in (dict, list, tuple):
        numbers = {_number(part, store) for part in (x.values() if type(x) is dict else x)}
        return numbers.pop() if len(numbers) == 1 else sorted(numbers, key=str)
    return int(x[-1]) if type(x) in (SimArray, np.ndarray) else type(x).__name__


def look_from_a_client_of_its_own(futures: list[Any]) -> list[Any]:
    return look(*get_client().gather([future for [future] in futures]))


async def coroutine(*values: Any) -> list[Any]:
    return look(*values)


class Holder:
    values: Any = ()  # distributed looks for an actor's attributes in its class

    def __init__(self, *values: Any) -> None:
        self.values = values

    def look(self) -> list[Any]:
        return look(*self.values)

    def get(self) -> Any:
        return self.values


def of_its_data(keys: list[str], dask_worker: Worker) -> list[Any]:
    return [dask_worker.data[key] for key in keys]


async def by_all_paths(client: Client, a: Worker, b: Worker) -> dict[str, Any]:
    """Let values take each path on which one leaves a store, and return what was met there."""
    met: dict[str, Any] = {}
    futures = [client.submit(make_any, i, key=f"k-{i}", workers=["ab"[i // 10]]) for i in range(N)]
    await wait(futures)
    for w in (a, b):
        assert await asyncio.to_thread(w.data.settle, 30)
    keys = [future.key for future in futures]
    met["gather"] = look(*await client.gather(futures))
    met["direct gather"] = look(*await client.gather(futures, direct=True))
    for name in "ab":
        on = {"workers": [name], "pure": False}
        met[f"task on {name}"] = await client.submit(look, *futures, **on)
        met[f"coroutine on {name}"] = await client.submit(coroutine, *futures, **on)
        met[f"client on {name}"] = await client.submit(look_from_a_client_of_its_own, [[f] for f in futures], **on)
    holder = await client.submit(Holder, *futures, actor=True, workers=["a"])
    met["actor"] = await holder.look()
    met["actor's answer"] = look(*await holder.get())
    met["actor's attribute"] = look(*await holder.values)
    met["run"] = look(*(await client.run(of_its_data, keys, workers=[a.address]))[a.address])
    await client.replicate(futures)
    met["replicas"] = look(*(await client.run(of_its_data, keys, workers=[b.address]))[b.address])
    scattered = await client.scatter([make_any(i) for i in range(N)], broadcast=True, hash=False)
    met["scatter"] = look(*await client.gather(scattered))
    met["scatter, in a task"] = await client.submit(look, *scattered, workers=["b"], pure=False)
    met["rechunk"] = await rechunk(client)
    return met


def strange(met: dict[str, Any]) -> dict[str, Any]:
    """Return what was met on a path, if it is not all numbers in their order."""
    return {path: list(numbers) for path, numbers in met.items() if list(numbers) != list(range(N))}


async def rechunk(client: Client) -> list[int]:
    """Let arrays go from worker to worker by distributed's P2P, and return the number of each row."""
    host = np.arange(N)[:, None] + np.zeros((N, 10 * KIB))
    x = da.from_array(host, chunks=(2, 10 * KIB)).map_blocks(sim.asarray, dtype=float, meta=sim.asarray([[0.0]]))
    back = await client.compute(x.rechunk((N, 2 * KIB), method="p2p"))
    return (
        [int(row[0]) for row in back]
        if type(back) is SimArray and bool((back == sim.asarray(host)).all())
        else [type(back)]
    )
