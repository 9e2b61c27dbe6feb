"""Many workers that die at once, as a scheduler tells the others."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from distributed import Scheduler, Status
from distributed.protocol import dumps, loads
from distributed.scheduler import WorkerState
from silent_workers import Silent, join
from waiting import when

from hpcgpu.deploy.processes import removals
from hpcgpu.deploy.processes.removals import PacedScheduler
from hpcgpu.deploy.processes.scheduler import silent
from hpcgpu.deploy.processes.stalls import StallDetector

LEFT, DEAD = 20, 10


def told(batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [message for batch in batches for message in batch if message["op"] == "remove-worker"]


@pytest.mark.parametrize("together", [False, True], ids=["distributed alone", "together"])
async def test_deaths_at_once_make_one_message_each_for_all(together: bool) -> None:
    """distributed alone makes one for each pair of a worker that died and one that lives."""
    kind = PacedScheduler if together else Scheduler
    async with kind(dashboard_address=":0", port=0) as scheduler, AsyncExitStack() as members:
        comms = [await join(scheduler, number, {"dask": "1"}) for number in range(1, LEFT + DEAD + 1)]
        for comm in comms[:LEFT]:
            members.push_async_callback(comm.leave)
        await asyncio.gather(*(comm.leave() for comm in comms[LEFT:]))
        left = comms[:LEFT]
        await when(lambda: all(len(told(comm.news)) >= DEAD for comm in left))
        addresses = {f"tls://127.0.0.1:{number}" for number in range(LEFT + 1, LEFT + DEAD + 1)}
        assert all(
            len(of) == DEAD and {each["worker"] for each in of} == addresses
            for of in (told(comm.news) for comm in left)
        )
        messages = {id(message) for comm in left for message in told(comm.news)}
        assert len(messages) == (DEAD if together else DEAD * LEFT)


async def test_death_while_others_are_told_of_one_is_told_too() -> None:
    async with PacedScheduler(dashboard_address=":0", port=0) as scheduler, AsyncExitStack() as members:
        first, second, third = [await join(scheduler, number, {"dask": "1"}) for number in (1, 2, 3)]
        members.push_async_callback(third.leave)
        await first.leave()
        second.abort()  # its connection is closed, and the scheduler has not noticed
        await when(lambda: len(scheduler.workers) == 1)
        await when(lambda: len(told(third.news)) == 2)
        assert [each["worker"] for each in told(third.news)] == ["tls://127.0.0.1:1", "tls://127.0.0.1:2"]


async def test_deaths_at_once_are_handled_in_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two the loop serves others; a worker that waits for its removal gets no task."""
    monkeypatch.setattr(removals, "_HOLD_S", 0.0)
    async with PacedScheduler(dashboard_address=":0", port=0) as scheduler:
        comms = [await join(scheduler, number, {"dask": "1"}) for number in range(LEFT + DEAD)]
        for comm in comms[:DEAD]:
            comm.abort()
        left = []
        while not left or left[-1] > LEFT:
            await asyncio.sleep(0)
            left.append(len(scheduler.workers))
            assert len(scheduler.running) in (LEFT, LEFT + DEAD)
        assert {before - after for before, after in itertools.pairwise(left)} <= {0, 1}
        for comm in comms[DEAD:]:
            await comm.leave()


async def test_few_of_those_that_die_at_once_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """One removal a turn: if all looked each turn, they would as often as half the square of their number."""
    looks = itertools.count()
    monkeypatch.setattr(removals, "_HOLD_S", 0.0)
    monkeypatch.setattr(removals, "_AT_ONCE", 2)
    monkeypatch.setattr(removals, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 0 * next(looks)))
    async with PacedScheduler(dashboard_address=":0", port=0) as scheduler:
        comms = [await join(scheduler, number, {"dask": "1"}) for number in range(LEFT + 5 * DEAD)]
        await asyncio.gather(*(comm.leave() for comm in comms[LEFT:]))
        assert next(looks) <= 5 * DEAD * 5
        for comm in comms[:LEFT]:
            await comm.leave()


async def test_restart_leaves_no_worker_that_waits_for_its_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    """distributed counts workers when nannies have ended theirs, and would take these for new ones."""

    @asynccontextmanager
    async def rpc(address: str, **_: Any) -> AsyncIterator[SimpleNamespace]:
        async def kill(**_: Any) -> None:
            nannies[address].abort()

        yield SimpleNamespace(kill=kill)

    monkeypatch.setattr(removals, "_HOLD_S", 0.0)
    monkeypatch.setattr(removals, "_AT_ONCE", 1)
    monkeypatch.setattr("distributed.scheduler.rpc", rpc)
    async with PacedScheduler(dashboard_address=":0", port=0) as scheduler:
        nannies = {f"nanny-{number}": await join(scheduler, number, {"dask": "1"}) for number in range(10, 40)}
        for worker, nanny in zip(scheduler.workers.values(), nannies, strict=True):
            worker.nanny = nanny
        for dead in list(nannies.values())[:LEFT]:
            dead.abort()
        while len(scheduler.running) > DEAD:
            await asyncio.sleep(0)
        await scheduler.restart_workers(timeout=5.0, stimulus_id="test", wait_for_workers=False)
        assert not scheduler.workers


async def test_workers_facts_are_made_once_for_cluster_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[WorkerState] = []
    identity = WorkerState.identity
    monkeypatch.setattr(WorkerState, "identity", lambda worker: made.append(worker) or identity(worker))
    async with PacedScheduler(dashboard_address=":0", port=0) as scheduler, AsyncExitStack() as members:
        stalls = StallDetector(scheduler, Mock(), 60.0)
        members.callback(stalls.close)
        for number in range(LEFT):
            members.push_async_callback((await join(scheduler, number, {"dask": "1"})).leave)
        (first, second) = [loads(dumps(stalls.subscribe(Silent())))["workers"] for _ in range(2)]
        assert first == second
        assert list(first) == list(scheduler.workers)
        assert len(made) == LEFT
        next(iter(scheduler.workers.values())).status = Status.paused
        third = loads(dumps(stalls.subscribe(Silent())))["workers"]
        assert [worker["status"] for worker in third.values()] == ["paused"] + ["running"] * (LEFT - 1)


@pytest.mark.parametrize(("count", "ago_s", "are_silent"), [(8, 19, 0), (8, 25, 8), (4000, 25, 0), (4000, 70, 4000)])
def test_worker_between_two_heartbeats_is_not_silent(count: int, ago_s: float, are_silent: int) -> None:
    """distributed has each of 4,000 workers send one in 21 s."""
    worker = SimpleNamespace(last_seen=time.time() - ago_s)
    assert len(silent({str(number): worker for number in range(count)})) == are_silent
