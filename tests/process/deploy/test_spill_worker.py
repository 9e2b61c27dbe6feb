"""The store in real workers: a graph with transfers, executors, loss, release; test_comms has the paths of values."""

import asyncio
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import wait
from distributed.utils import DequeHandler
from lock_guard import leaf_lock
from store_clusters import KIB, cluster, kinds, make, small_gpu
from waiting import scaled

from hpcgpu.sim import SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer

_leaf_lock, gpu = leaf_lock, small_gpu


@pytest.fixture(autouse=True)
def _nothing_is_left(gpu: SimGpu, tmp_path: Path) -> Iterator[None]:
    yield
    assert list(tmp_path.iterdir()) == []


async def test_a_peer_gets_spilled_values_without_the_device(gpu: SimGpu, tmp_path: Path) -> None:
    async with cluster(tmp_path, plugin=True) as (client, a, b):
        futures = [client.submit(make, i, key=f"k-{i}", workers=["a"]) for i in range(20)]
        await client.gather([client.submit(type, f, workers=["a"], pure=False) for f in futures])
        assert await asyncio.to_thread(a.data.settle, 10)
        with a.data.handing_out_handles():
            below = [f for f in futures if type(a.data[f.key]) is not SimArray]
        assert len(below) > 10
        copies = gpu.h2d_copies, gpu.d2h_copies
        await client.replicate(below, workers=[b.address])
        assert all(f.key in b.data for f in below)
        assert (gpu.h2d_copies, gpu.d2h_copies) == copies
        sums = await client.gather([client.submit(lambda x: int(x[0]), f, workers=["b"]) for f in below])
        assert sums == [int(f.key[2:]) for f in below]
        # in keywords, lists and dicts, too
        assert set(await client.submit(kinds, futures, x={"a": futures[3]}, workers=["b"])) == {"SimArray"}


async def test_a_thousand_reads_at_once_do_not_take_a_thread_each(gpu: SimGpu, tmp_path: Path) -> None:
    async with cluster(tmp_path, plugin=True) as (client, a, _):
        values = {f"k-{i}": np.full(2 * KIB, i) for i in range(1000)}
        futures = await client.scatter(values, workers=[a.address], hash=False)
        assert await asyncio.to_thread(a.data.settle, 30)
        assert a.data.tiers["disk"] > 14_000 * KIB
        counts = []

        async def read(key: str) -> int:
            found = await client.gather(futures[key], direct=True)
            counts.append(threading.active_count())
            return int(found[-1])

        before = threading.active_count()
        assert await asyncio.gather(*(read(key) for key in values)) == list(range(1000))
        assert max(counts) <= before + 8  # dask's pool for serialization, and that of the event loop


class Asked:
    """A peer's connection, with what was answered."""

    peer_address = "tcp://127.0.0.1:1"

    async def write(self, message: dict[str, Any], **_: Any) -> int:
        self.answer = message
        return 1

    async def read(self, **_: Any) -> str:
        return "OK"


async def test_a_closed_worker_still_has_its_keys(gpu: SimGpu, tmp_path: Path) -> None:
    """It is right about itself, as distributed sees it, and a peer that asks at its end is told that it has nothing."""
    async with cluster(tmp_path, plugin=True) as (client, a, _):
        futures = [client.submit(make, i, workers=["a"]) for i in range(9)]
        await client.gather([client.submit(type, f, workers=["a"], pure=False) for f in futures])
        keys = list(a.data)
        await a.close()
        assert {f.key for f in futures} <= set(keys) == set(a.data)
        a.state.validate_state()
        await a.handlers["get_data"](asked := Asked(), keys=keys, who="a peer")
        assert (asked.answer["status"], asked.answer["data"]) == ("OK", {})


def total(x: SimArray) -> int:
    return int(x.get().sum())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_tasks_in_an_executors_processes_get_values(gpu: SimGpu, tmp_path: Path) -> None:
    async with cluster(tmp_path, plugin=True) as (client, a, _):
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as a.executors["processes"]:
            pid = a.executors["processes"].submit(os.getpid).result()  # forked before anything moves
            futures = [client.submit(make, i, workers=["a"]) for i in range(9)]
            await wait(futures)
            assert await asyncio.to_thread(a.data.settle, 10)
            assert a.data.spilled_total.disk > 0
            with dask.annotate(executor="processes", workers=["a"]):
                sums, there = client.map(total, futures), client.submit(os.getpid)
            assert await client.gather(sums) == [i * 100 * KIB for i in range(9)]
            assert await there == pid != os.getpid()


def fail(*_: Any) -> None:
    raise ValueError


async def fail_later(*_: Any) -> None:
    raise ValueError


def shapes(x: SimArray) -> list[str]:
    """What stands on the stack of users' code, for distributed's profile."""
    frame, out = sys._getframe(), list[str]()
    while frame and not frame.f_code.co_filename.endswith("distributed/worker.py"):  # Worker.trigger_profile
        out.append(frame.f_code.co_name)
        frame = frame.f_back
    return out


async def test_tracebacks_and_profiles_have_no_frames_of_the_store(gpu: SimGpu, tmp_path: Path) -> None:
    async def frames(*, plugin: bool) -> list[list[str]]:
        async with cluster(tmp_path, plugin=plugin) as (client, _, __):
            x = client.submit(make, 1)
            failed = [client.submit(f, x) for f in (fail, fail_later)]
            await wait(failed)
            seen = [[f.name for f in traceback.extract_tb(await future.traceback())] for future in failed]
            return [*seen, await client.submit(shapes, x)]

    plain = await frames(plugin=False)
    assert plain == [["fail"], ["fail_later"], ["shapes", "__call__"]]
    assert await frames(plugin=True) == plain


@pytest.mark.parametrize(("target", "on_disk"), [(0.7, 1), (0.4, 7), (False, 1)])
def test_spilling_goes_from_the_spill_threshold_to_the_target(
    tmp_path: Path, target: float | bool, on_disk: int
) -> None:
    """15 MB are above ``spill``, 0.7 of 20 MB; distributed asks for memory once, and not again below that."""
    memory = {"target": target, "spill": 0.7, "pause": False, "monitor-interval": "10ms"}
    config = {f"distributed.worker.memory.{name}": value for name, value in memory.items()}

    async def main() -> None:
        async with cluster(tmp_path, plugin=True, memory_limit="20 MB") as (client, a, _):
            a.monitor.get_process_memory = lambda: len(a.data) * 10**6 - a.data.tiers["disk"]
            futures = [client.submit(np.zeros, 10**6, "u1", workers=["a"], pure=False) for _ in range(14)]
            await wait(futures)
            assert await asyncio.to_thread(a.data.settle, 10)
            assert a.data.tiers["disk"] == 0
            futures.append(client.submit(np.zeros, 10**6, "u1", workers=["a"], pure=False))
            await wait(futures)
            while a.monitor.get_process_memory() > (target or 0.7) * 20e6:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(a.data.settle, 10)
            assert a.data.tiers["disk"] // 10**6 == on_disk

    with dask.config.set(config):
        asyncio.run(asyncio.wait_for(main(), scaled(60)))


def test_value_lost_on_disk_is_computed_again(
    gpu: SimGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what nobody can compute again is handed over, before anything is read that nobody asks for."""
    asked, looked_at = set(), {}
    get = GpuSpillBuffer.__getitem__

    def get_and_note(store: GpuSpillBuffer, key: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # tasks get their data on the event loop
            looked_at[key] = key in asked
        return get(store, key)

    async def main() -> None:
        async with cluster(tmp_path, plugin=True) as (client, a, _):
            send = a.handlers["get_data"]

            async def note_and_send(comm: Any, keys: Any, **options: Any) -> Any:
                asked.update(keys)
                return await send(comm, keys=keys, **options)

            a.handlers["get_data"] = note_and_send
            only = {"workers": ["a", "b"], "allow_other_workers": True}
            futures = [client.submit(make, i, key=f"k-{i}", **only) for i in range(40)]
            await client.gather([client.submit(type, f, pure=False) for f in futures])
            assert await asyncio.to_thread(a.data.settle, 10)
            lost = [p for p in a.data.disk.folder.iterdir() if p.name != ".lock"]
            assert lost
            for path in lost:
                os.truncate(path, 10)
            kept = await client.scatter({"kept": "what nobody can compute again"}, workers=[a.address])
            asked.clear()
            monkeypatch.setattr(GpuSpillBuffer, "__getitem__", get_and_note)
            firsts = [client.submit(lambda x: int(x[0]), f, pure=False, retries=3) for f in futures]
            assert await client.gather(firsts) == list(range(40))
            await a.finished()
            assert await kept["kept"] == "what nobody can compute again"
        assert "kept" in looked_at
        assert all(looked_at.values())

    with dask.config.set({"distributed.comm.timeouts.connect": "2s"}):  # so long does a peer try to reach one that left
        asyncio.run(asyncio.wait_for(main(), scaled(120)))
    # Records have tracebacks, whose frames have the file that could not be read; pytest and distributed keep them.
    caplog.clear()
    DequeHandler.clear_all_instances()
