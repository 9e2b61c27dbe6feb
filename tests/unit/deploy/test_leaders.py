"""Which leaders have workers, or will have them again: a run in which none has is to end."""

from __future__ import annotations

import asyncio
from typing import Any

from comms import Comm
from waiting import run, when

from hpcgpu.deploy.processes.scheduler import LeaderConnections


class Told:
    """Rank 0, which is told."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def send(self, op: str, **facts: Any) -> None:
        self.all.append({"op": op, **facts})

    def workers(self, working: int, died: str = "") -> bool:
        """Whether this is the last that it was told."""
        return bool(self.all) and self.all[-1] == {"op": "leaders", "working": working, "died": died}


def test_end_of_the_last_workers_is_told_with_their_ends() -> None:
    async def body() -> None:
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

    run(body)


def test_how_workers_died_is_told() -> None:
    async def body() -> None:
        told, comm = Told(), Comm({"died": "worker b: nanny-instantiate-timeout"})
        serving = asyncio.create_task(LeaderConnections(told).serve(comm, node="n1", workers=2))
        await when(lambda: told.workers(0, "worker b: nanny-instantiate-timeout"))
        comm.abort()
        await serving

    run(body)


def test_a_lost_leader_is_told_at_once() -> None:
    async def body() -> None:
        told, lost = Told(), Comm()
        leaders = LeaderConnections(told)
        lost.abort()
        await leaders.serve(lost, node="n1", workers=2)
        assert told.workers(0, "node n1 lost its leader")
        assert {"op": "leader_lost", "node": "n1"} in told.all
        assert leaders.none_come

    run(body)


def test_where_more_may_come_nobody_is_told() -> None:
    async def body() -> None:
        told, comm = Told(), Comm({"died": "worker a: nanny-close"})
        leaders = LeaderConnections(told, grows=True)
        serving = asyncio.create_task(leaders.serve(comm, node="n1", workers=2))
        await when(lambda: not comm.messages)
        comm.abort()
        await serving
        assert not leaders.none_come
        assert told.all == [{"op": "leader_lost", "node": "n1"}]

    run(body)
