"""Hundreds of workers at a real scheduler: counts of its calls, and of the workers that it has lost."""

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest
from crowd import Crowd
from distributed import Client, Scheduler, Security
from distributed.comm import CommClosedError
from waiting import aside, scaled, until, when

from hpcgpu import LocalGPUCluster
from hpcgpu.deploy.processes.registration import Registration

FEW, MANY = 20, 200
# Longer than a handshake may take (distributed.comm.timeouts.handshake, 10 s).
HELD_S = 15.0


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__HANDSHAKE", f"{scaled(60)}s")  # the crowd may be slow
    with LocalGPUCluster(gpus="sim:1x16MiB", dashboard=False, quiet=True) as cluster, Client(cluster) as client:
        yield client


def test_workers_stay_while_the_loop_is_held(client: Client, tmp_path: Path) -> None:
    def hold(path: str, held_s: float, dask_scheduler: Any = None) -> None:
        import time

        with open(path) as gate:  # noqa: PTH123 - pickled
            gate.read()
        time.sleep(held_s)

    def counts(dask_scheduler: Any = None) -> tuple[int, int, int]:
        workers, silent = dask_scheduler.workers, dask_scheduler.handlers["hpcgpu_silent"]
        return len(workers), dask_scheduler._workers_removed_total, len(silent())

    os.mkfifo(gate := tmp_path / "gate")
    with Crowd(client.cluster, 2, 2, at_once=FEW) as crowd:
        crowd.join([f"worker-{number}" for number in range(MANY)])
        held = aside(lambda: client.run_on_scheduler(hold, str(gate), HELD_S))
        with gate.open("w"):  # the loop reads it
            beating = aside(lambda: crowd.beat(2.0, 0.5))
        held.result(HELD_S + scaled(60))
        beating.result(scaled(60))  # each heartbeat has its answer
        assert client.run_on_scheduler(counts) == (MANY + 1, 0, 0)
        crowd.leave()


def test_heartbeats_take_no_connection_of_their_own(client: Client) -> None:
    async def beats(dask_scheduler: Any = None) -> None:
        import asyncio

        (worker,) = dask_scheduler.workers.values()
        for _ in range(2):
            seen_s = worker.last_seen
            while worker.last_seen == seen_s:
                await asyncio.sleep(0.01)

    def connections(dask_worker: Any = None) -> int:
        pool, address = dask_worker.rpc, dask_worker.scheduler.address
        return len(pool.available[address]) + len(pool.occupied[address])

    client.run_on_scheduler(beats)
    assert set(client.run(connections).values()) == {0}


WITH_A_LATE_PLUGIN = """
import asyncio, cloudpickle, sys
from distributed.diagnostics.plugin import NannyPlugin

class Marks(NannyPlugin):

    def setup(self, nanny):
        nanny.marks = getattr(nanny, "marks", 0) + 1

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # nannies have no such module

def dask_setup(scheduler):
    register, scheduler.registrations = scheduler.handlers["register_nanny"], []

    async def count(comm, **facts):
        scheduler.registrations.append(facts)
        registers = asyncio.create_task(register(comm, **facts))
        await asyncio.sleep(0)
        if len(scheduler.registrations) == 1:
            plugin = cloudpickle.dumps(Marks())
            scheduler.late = asyncio.create_task(scheduler.register_nanny_plugin(None, plugin, "marks", False))
        await registers

    scheduler.handlers["register_nanny"] = count
"""


def test_nannies_of_a_node_register_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plugin that is registered while they start comes to each once."""
    (tmp_path / "preload.py").write_text(WITH_A_LATE_PLUGIN)
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__PRELOAD", str(tmp_path / "preload.py"))

    async def registrations(dask_scheduler: Any = None) -> int:
        await dask_scheduler.late
        return len(dask_scheduler.registrations)

    with LocalGPUCluster(gpus="sim:4x16MiB", dashboard=False, quiet=True) as cluster, Client(cluster) as client:
        assert client.run_on_scheduler(registrations) == 1
        assert [*client.run(lambda dask_worker: dask_worker.marks, nanny=True).values()] == [1] * 4


async def test_nannies_register_again_when_their_connection_broke() -> None:
    async def begin() -> Any:
        nanny: Any = SimpleNamespace(preloads=SimpleNamespace(start=AsyncMock()), rpc=SimpleNamespace())
        registration.take(nanny)
        await nanny.preloads.start()
        comm = await nanny.rpc.connect(scheduler.address)
        await comm.write({"op": "register_nanny", "address": "tcp://127.0.0.1:1"})
        assert await comm.read() == {"status": "OK", "nanny-plugins": {}}
        return comm

    async with (
        Scheduler(host="127.0.0.1", port=0, dashboard=False) as scheduler,
        Registration(scheduler.address, Security()) as registration,
    ):
        first, second = [await begin(), await begin()]
        await first.write({"status": "ok"})
        (comm,) = scheduler._comms
        comm.abort()
        with pytest.raises(CommClosedError):
            while await second.write({"status": "ok"}) is None:
                await asyncio.sleep(0.01)
        await when(lambda: not scheduler._starting_nannies)
        await begin()
        assert scheduler._starting_nannies
    await when(lambda: not scheduler._starting_nannies)


def test_heartbeats_at_the_same_time_have_an_answer_each(client: Client) -> None:
    """Programs send some themselves, as examples/memory_types.py does, beside the worker's."""

    async def beat(limit_s: float, dask_worker: Any = None) -> None:
        import asyncio

        beats = [dask_worker.heartbeat() for _ in range(3)]
        await asyncio.wait_for(asyncio.gather(*beats), limit_s)

    client.run(beat, scaled(30))


def test_a_worker_is_told_of_its_removal_whatever_its_heartbeats(tmp_path: Path) -> None:
    """Its connection ended before the scheduler had sent it: a job whose last worker was retired had failed."""

    async def beat_on(folder: str, dask_worker: Any = None) -> int:
        import asyncio
        import os
        from pathlib import Path

        async def beats() -> None:
            while True:
                await dask_worker.heartbeat()

        async def note(*args: Any, **options: Any) -> Any:
            (Path(folder) / str(dask_worker.name)).write_text(f"{options['reason']}\n")
            return await close(*args, **options)

        close, dask_worker.close = dask_worker.close, note  # the order to close is bound to the plain one
        dask_worker.beats = [asyncio.create_task(beats()) for _ in range(5)]
        return os.getpid()

    with LocalGPUCluster(gpus="sim:7x16MiB", dashboard=False, quiet=True) as cluster, Client(cluster) as client:
        pids = client.run(beat_on, str(tmp_path))
        *leaving, _ = pids
        for address in leaving:
            client.retire_workers([address], close_workers=True)
        until(lambda: not any(psutil.pid_exists(pids[address]) for address in leaving), "they have left")
        assert [path.read_text() for path in tmp_path.iterdir()] == []


def test_heartbeats_leave_nothing_in_memory(client: Client) -> None:
    """distributed keeps the last 1,000 messages of each stream: 320 KiB of heartbeats in the scheduler for a worker."""

    async def beat(dask_worker: Any = None) -> None:
        for _ in range(3):
            await dask_worker.heartbeat()

    def left() -> int:
        import gc

        return sum(type(each) is dict and each.get("op") == "hpcgpu_heartbeat" for each in gc.get_objects())

    client.run(beat)

    assert sum(client.run(left).values()) <= 1
    assert client.run_on_scheduler(left) <= 1


def test_events_at_once_are_handled_in_many_turns(client: Client) -> None:
    """Each once before any a second time, though none is read: no peer waits for others that always say something."""

    async def turns(count: int, dask_scheduler: Any = None) -> tuple[int, int]:
        import asyncio
        import socket

        turn, seen, most = list[int](), list[int](), 0
        pairs = [socket.socketpair() for _ in range(count)]
        for number, (near, far) in enumerate(pairs):
            far.send(b"x")
            asyncio.get_running_loop().add_reader(near, turn.append, number)
        while len(seen) < count:
            await asyncio.sleep(0)
            seen, most = [*seen, *turn], max(most, len(turn))
            turn.clear()
        for near, _ in pairs:
            asyncio.get_running_loop().remove_reader(near)
        return most, len({*seen[:count]})

    assert client.run_on_scheduler(turns, MANY) == (16, MANY)


@pytest.mark.skipif(gc.get_threshold()[2] == 0, reason="this Python collects all in small steps")
def test_collections_of_garbage_look_at_few_new_objects(client: Client) -> None:
    def most(dask_scheduler: Any = None) -> int:
        import gc

        looked_at, kept = list[int](), list[list[int]]()

        def note(phase: str, facts: dict[str, int]) -> None:
            if (phase, facts["generation"]) == ("start", 1):
                looked_at.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))

        gc.callbacks.append(note)
        kept += ([] for _ in range(200_000))
        gc.callbacks.remove(note)
        return max(looked_at)

    assert client.run_on_scheduler(most) < 30_000


def test_heartbeat_calls_our_code_as_often_for_many_as_for_few(client: Client) -> None:
    """Nothing of ours looks at all workers at a heartbeat: it would hold the loop of thousands."""

    def watch(dask_scheduler: Any = None) -> None:
        import collections
        import sys

        calls = dask_scheduler.calls = collections.Counter()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                calls["ours"] += "/hpcgpu/" in frame.f_code.co_filename
                calls["heartbeats"] += frame.f_code.co_name == "heartbeat_worker"

        sys.setprofile(note)

    def calls(dask_scheduler: Any = None) -> dict[str, int]:
        import sys

        sys.setprofile(None)
        return dict(dask_scheduler.calls)

    def ours_of_each(crowd: Crowd) -> float:
        client.run_on_scheduler(watch)
        crowd.beat(2.0, 0.5)
        of = client.run_on_scheduler(calls)
        return of["ours"] / of["heartbeats"]

    with Crowd(client.cluster, 2, 2, at_once=FEW) as crowd:
        crowd.join([f"few-{number}" for number in range(FEW)])
        few = ours_of_each(crowd)
        crowd.join([f"many-{number}" for number in range(MANY - FEW)])
        many = ours_of_each(crowd)
        assert many < few + 1
        crowd.leave()


def test_client_that_attaches_is_sent_few_of_many_workers(client: Client) -> None:
    def watch(dask_scheduler: Any = None) -> None:
        import sys

        dask_scheduler.sent = 0

        def note(frame: Any, event: str, _: Any) -> None:
            dask_scheduler.sent += event == "call" and frame.f_code.co_qualname == "WorkerState.identity"

        sys.setprofile(note)

    def sent(dask_scheduler: Any = None) -> int:
        import sys

        sys.setprofile(None)
        return int(dask_scheduler.sent)

    with Crowd(client.cluster, 2, 2, at_once=FEW) as crowd:
        crowd.join([f"worker-{number}" for number in range(MANY)])
        client.run_on_scheduler(watch)
        with Client(client.cluster):
            assert client.run_on_scheduler(sent) < FEW
        crowd.leave()
