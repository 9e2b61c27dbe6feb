"""No user code meets a handle, or a proxy of another store: by whatever connection and path a value comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Worker, get_client, get_worker, wait
from distributed.comm.registry import backends
from lock_guard import guarded_lock
from spill_stores import KIB, SlowGpu
from store_clusters import cluster

from hpcgpu import sim
from hpcgpu.sim import SimArray
from hpcgpu.sim.dask import register
from hpcgpu.spill.proxies.proxy import is_proxy, source_of

# distributed's, but UCX's, which tests/ucx has
COMMS = sorted(set(backends) - {"ucx", "ucxx"})
N = 20


class WatchedGpu(SlowGpu):
    """A device that notes its copies on an event loop, by their direction."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(memory_bytes)
        self.on_loop, self.elsewhere = Counter[str](), Counter[str]()

    def _note(self, way: str) -> None:
        (self.elsewhere if asyncio._get_running_loop() is None else self.on_loop)[way] += 1

    def pack(self, *args: Any) -> Any:
        self._note("down")
        return super().pack(*args)

    def to_host(self, *args: Any) -> Any:
        self._note("down")
        return super().to_host(*args)

    def unpack(self, *args: Any) -> Any:
        self._note("up")
        return super().unpack(*args)

    def asarray(self, x: Any) -> SimArray:
        self._note("up")
        return super().asarray(x)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WatchedGpu]:
    before = sim.current_gpu()
    sim.set_current_gpu(made := WatchedGpu(64 << 20))
    register()
    with guarded_lock(monkeypatch):
        yield made
    sim.set_current_gpu(before)
    assert list(tmp_path.iterdir()) == []


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
        found = {_number(part, store) for part in (x.values() if type(x) is dict else x)}
        return found.pop() if len(found) == 1 else sorted(found, key=str)
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
    return met


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


@pytest.mark.parametrize("jit_unspill", [False, True], ids=["whole", "jit"])
@pytest.mark.parametrize("comm", COMMS)
def test_all_paths_by_every_comm_give_user_code_values(tmp_path: Path, comm: str, jit_unspill: bool) -> None:
    async def main() -> dict[str, Any]:
        async with cluster(tmp_path, plugin=True, jit_unspill=jit_unspill, protocol=comm) as (client, a, b):
            met = await by_all_paths(client, a, b)
            met["rechunk"] = await rechunk(client)
            assert min(sum(w.data.counters[way].number for w in (a, b)) for way in a.data.counters) > 0
            return met

    met = asyncio.run(asyncio.wait_for(main(), 120))
    assert {path: numbers for path, numbers in met.items() if list(numbers) != list(range(N))} == {}


@pytest.mark.parametrize("jit_unspill", [False, True], ids=["whole", "jit"])
@pytest.mark.parametrize("comm", ["inproc", "tcp"])
def test_values_that_are_up_leave_without_a_copy_on_the_loop(
    tmp_path: Path, comm: str, jit_unspill: bool, gpu: WatchedGpu
) -> None:
    async def main() -> None:
        async with cluster(tmp_path, plugin=True, jit_unspill=jit_unspill, protocol=comm) as (client, a, b):
            futures = [client.submit(make, i, workers=["a"]) for i in (0, 2, 3)]
            await wait(futures)
            assert a.data.tiers["device"] > 200 * KIB
            await client.replicate(futures, workers=[b.address])
            assert all(future.key in b.data for future in futures)
            assert gpu.on_loop == {}
            sent = gpu.elsewhere["down"]
            if comm == "tcp":
                assert sent >= 3
            await client.gather(futures)
            await client.gather(futures, direct=True)
            assert gpu.on_loop["down"] == 0  # the client is in this process: it brings values up on the same loop

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_loop_turns_while_a_peer_waits_for_a_copy(tmp_path: Path, gpu: WatchedGpu) -> None:
    """As with a kernel of minutes, for which a copy down waits: this loop, the worker's, ends the wait."""

    async def main() -> None:
        async with cluster(tmp_path, plugin=True) as (client, a, _):
            future = client.submit(make, 3, workers=["a"])
            await wait(future)
            gpu.waits = True
            copy = client.submit(look, future, workers=["b"])
            assert await asyncio.to_thread(gpu.under_way.wait, 30)
            assert (await client.run(lambda dask_worker: dask_worker.name, workers=[a.address]))[a.address] == "a"
            gpu.go_on.set()
            assert await copy == [3]

    asyncio.run(asyncio.wait_for(main(), 60))
