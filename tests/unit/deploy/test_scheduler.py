"""The scheduler process: leaders that have workers or will have them again, and workers that have all paused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from comms import Comm
from distributed import Client, Scheduler, Worker
from distributed.core import Status
from waiting import scaled, when

from hpcgpu.deploy.processes.scheduler import LeaderConnections
from hpcgpu.deploy.processes.stalls import TROUBLE, StallDetector
from hpcgpu.errors import JobError


class Told:
    """Rank 0, which is told."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def send(self, op: str, **facts: Any) -> None:
        self.all.append({"op": op, **facts})

    def workers(self, working: int, died: str = "") -> bool:
        """Whether this is the last that it was told."""
        return bool(self.all) and self.all[-1] == {"op": "leaders", "working": working, "died": died}


async def test_end_of_the_last_workers_is_told_with_their_ends() -> None:
    told = Told()
    leaders = LeaderConnections(told)
    retired, none, broken = Comm({"died": ""}), Comm(), Comm()
    async with asyncio.TaskGroup() as serving:
        serving.create_task(leaders.serve(none, node="n0"))
        serving.create_task(leaders.serve(retired, node="n1", workers=2))
        await when(lambda: told.workers(0))
        assert leaders.none_come
        late = serving.create_task(leaders.serve(broken, node="n2", workers=2))
        await when(lambda: told.workers(1))
        broken.abort()
        await late
        assert leaders.none_come
        retired.abort()
        none.abort()


async def test_how_workers_died_is_told() -> None:
    told, comm = Told(), Comm({"died": "worker b: nanny-instantiate-timeout"})
    serving = asyncio.create_task(LeaderConnections(told).serve(comm, node="n1", workers=2))
    await when(lambda: told.workers(0, "worker b: nanny-instantiate-timeout"))
    comm.abort()
    await serving


async def test_a_lost_leader_is_told_at_once() -> None:
    told, lost = Told(), Comm()
    leaders = LeaderConnections(told)
    lost.abort()
    await leaders.serve(lost, node="n1", workers=2)
    assert told.workers(0, "node n1 lost its leader")
    assert {"op": "leader_lost", "node": "n1"} in told.all
    assert leaders.none_come


async def test_where_more_may_come_nobody_is_told() -> None:
    told, comm = Told(), Comm({"died": "worker a: nanny-close"})
    leaders = LeaderConnections(told, grows=True)
    serving = asyncio.create_task(leaders.serve(comm, node="n1", workers=2))
    await when(lambda: not comm.messages)
    comm.abort()
    await serving
    assert not leaders.none_come
    assert told.all == [{"op": "leader_lost", "node": "n1"}]


async def test_all_workers_paused_is_one_error_and_tasks_go_on_later() -> None:
    said: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    async with (
        Scheduler(port=0, dashboard=False) as scheduler,
        Worker(scheduler.address, name="a", memory_limit=0) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        there = await client.scatter(1)
        stalls = StallDetector(scheduler, 0.5, lambda *words: said.put_nowait(words))
        worker.metrics[TROUBLE] = lambda _: "no space left on device"
        worker.status = Status.paused
        await worker.heartbeat()
        waiting = client.submit(lambda x: x + 1, there)
        with pytest.raises(JobError, match=r"all workers have paused for 0.5 s.*a has .*\(no space left on device\)"):
            await asyncio.wait_for(waiting, scaled(30))
        assert await asyncio.wait_for(there, scaled(30)) == 1
        what, reason = await said.get()
        assert what == "all workers have paused"
        assert "take more workers, memory (memory_limit)" in reason
        assert stalls.reason == reason
        assert [facts["action"] for _, facts in scheduler.get_events("hpcgpu")] == ["stalled"]
        worker.status = Status.running
        assert await asyncio.wait_for(client.submit(lambda x: x + 1, there, pure=False), scaled(30)) == 2
        assert await said.get() == ("", "")
        assert stalls.reason == ""
        assert said.empty()
        stalls.close()


async def test_tasks_without_a_worker_fail_only_if_none_can_come() -> None:
    said: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    asked, none_come = 0, False

    def ask() -> bool:
        nonlocal asked
        asked += 1
        return none_come

    async with (
        Scheduler(port=0, dashboard=False) as scheduler,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        stalls = StallDetector(scheduler, 0.1, lambda *words: said.put_nowait(words), ask)
        waiting = client.submit(lambda: 1)
        await asyncio.wait_for(when(lambda: asked > 30), scaled(30))  # two and a half times as long
        assert (waiting.status, said.empty()) == ("pending", True)
        none_come = True
        with pytest.raises(JobError, match=r"no worker is left, and none comes: tasks have waited for 0.1 s"):
            await asyncio.wait_for(waiting, scaled(30))
        assert (await said.get())[0] == "no worker is left, and none comes"
        stalls.close()
