"""No user code meets a handle, or a proxy of another store: by whatever connection and path a value comes."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import wait
from distributed.comm.registry import backends
from lock_guard import guarded_lock
from spill_stores import KIB, SlowGpu
from store_clusters import by_all_paths, cluster, look, make_any, strange
from waiting import scaled, when

from hpcgpu import sim
from hpcgpu.sim import SimArray, register

# distributed's, but UCX's, which tests/ucx has
COMMS = sorted(set(backends) - {"ucx", "ucxx"})


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


@pytest.mark.parametrize("jit_unspill", [False, True], ids=["whole", "jit"])
@pytest.mark.parametrize("comm", COMMS)
async def test_all_paths_by_every_comm_give_user_code_values(tmp_path: Path, comm: str, jit_unspill: bool) -> None:
    async with cluster(tmp_path, plugin=True, jit_unspill=jit_unspill, protocol=comm) as (client, a, b):
        met = await by_all_paths(client, a, b)
        assert min(sum(w.data.counters[way].number for w in (a, b)) for way in a.data.counters) > 0
    assert strange(met) == {}


@pytest.mark.parametrize("jit_unspill", [False, True], ids=["whole", "jit"])
@pytest.mark.parametrize("comm", ["inproc", "tcp"])
async def test_values_that_are_up_leave_without_a_copy_on_the_loop(
    tmp_path: Path, comm: str, jit_unspill: bool, gpu: WatchedGpu
) -> None:
    async with cluster(tmp_path, plugin=True, jit_unspill=jit_unspill, protocol=comm) as (client, a, b):
        futures = [client.submit(make_any, i, workers=["a"]) for i in (0, 2, 3)]
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


class Unpicklable:
    """An attribute that no pickle takes."""

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class Model:
    """A value with an array that goes down."""

    def __init__(self, array: Any) -> None:
        self.array, self.other = array, Unpicklable()


async def test_a_spilled_value_that_cannot_be_pickled_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path, plugin=True) as (client, a, _):
        futures = client.map(lambda i: Model(sim.asarray(np.full(100 * KIB, i, "u1"))), range(8), workers=["a"])
        await wait(futures)
        assert await asyncio.to_thread(a.data.settle, scaled(20))
        assert a.data.tiers["host"] + a.data.tiers["disk"] > 100 * KIB
        waiting = client.map(type, futures, workers=["b"])
        await when(lambda: "object of type Model" in caplog.text)
        assert "_Call" not in caplog.text
        await client.cancel(waiting)


async def test_the_loop_turns_while_a_peer_waits_for_a_copy(tmp_path: Path, gpu: WatchedGpu) -> None:
    """As with a kernel of minutes, for which a copy down waits: this loop, the worker's, ends the wait."""
    async with cluster(tmp_path, plugin=True) as (client, a, _):
        future = client.submit(make_any, 3, workers=["a"])
        await wait(future)
        gpu.waits = True
        copy = client.submit(look, future, workers=["b"])
        assert await asyncio.to_thread(gpu.under_way.wait, 30)
        assert (await client.run(lambda dask_worker: dask_worker.name, workers=[a.address]))[a.address] == "a"
        gpu.go_on.set()
        assert await copy == [3]
