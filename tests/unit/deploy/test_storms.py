"""Many workers that die at once, as a scheduler tells the others."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Scheduler
from silent_workers import join
from waiting import when

from hpcgpu.deploy import compat
from hpcgpu.deploy.processes.scheduler import silent

LEFT, DEAD = 20, 10


def removals(batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [message for batch in batches for message in batch if message["op"] == "remove-worker"]


@pytest.mark.parametrize("together", [False, True], ids=["distributed alone", "together"])
async def test_deaths_at_once_make_one_message_each_for_all(together: bool) -> None:
    """distributed alone makes one for each pair of a worker that died and one that lives."""
    async with Scheduler(dashboard_address=":0", port=0) as scheduler, AsyncExitStack() as members:
        if together:
            compat.announce_together(scheduler)
        comms = [await join(scheduler, number, {"dask": "1"}) for number in range(1, LEFT + DEAD + 1)]
        for comm in comms[:LEFT]:
            members.push_async_callback(comm.leave)
        await asyncio.gather(*(comm.leave() for comm in comms[LEFT:]))
        left = comms[:LEFT]
        await when(lambda: all(len(removals(comm.news)) >= DEAD for comm in left))
        addresses = {f"tls://127.0.0.1:{number}" for number in range(LEFT + 1, LEFT + DEAD + 1)}
        assert all(
            len(of) == DEAD and {each["worker"] for each in of} == addresses
            for of in (removals(comm.news) for comm in left)
        )
        messages = {id(message) for comm in left for message in removals(comm.news)}
        assert len(messages) == (DEAD if together else DEAD * LEFT)


async def test_death_while_others_are_told_of_one_is_told_too() -> None:
    async with Scheduler(dashboard_address=":0", port=0) as scheduler, AsyncExitStack() as members:
        compat.announce_together(scheduler)
        first, second, third = [await join(scheduler, number, {"dask": "1"}) for number in (1, 2, 3)]
        members.push_async_callback(third.leave)
        await first.leave()
        second.abort()  # its connection is closed, and the scheduler has not noticed
        await when(lambda: len(scheduler.workers) == 1)
        await when(lambda: len(removals(third.news)) == 2)
        assert [each["worker"] for each in removals(third.news)] == ["tls://127.0.0.1:1", "tls://127.0.0.1:2"]


@pytest.mark.parametrize(("count", "ago_s", "are_silent"), [(8, 19, 0), (8, 25, 8), (4000, 25, 0), (4000, 70, 4000)])
def test_worker_between_two_heartbeats_is_not_silent(count: int, ago_s: float, are_silent: int) -> None:
    """distributed has each of 4,000 workers send one in 21 s."""
    worker = SimpleNamespace(last_seen=time.time() - ago_s)
    assert len(silent({str(number): worker for number in range(count)})) == are_silent
