"""The paths on which values leave a worker with the store, and what user code meets at their ends."""

from __future__ import annotations

import asyncio
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, Worker, get_client, get_worker, wait
from store_clusters import KIB

from hpcgpu import sim
from hpcgpu.sim import SimArray
from hpcgpu.spill.proxies import is_proxy, source_of

N = 20


def make(i: int) -> Any:
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
    futures = [client.submit(make, i, key=f"k-{i}", workers=["ab"[i // 10]]) for i in range(N)]
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
    scattered = await client.scatter([make(i) for i in range(N)], broadcast=True, hash=False)
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
