"""A client hears of workers that have all paused."""

from __future__ import annotations

import asyncio

import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import Status
from waiting import scaled, when

from hpcgpu.deploy.processes.stalls import TROUBLE, StallDetector
from hpcgpu.errors import JobError


def test_all_workers_paused_is_one_error_and_tasks_go_on_later() -> None:
    async def main() -> None:
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
            with pytest.raises(
                JobError, match=r"all workers have paused for 0.5 s.*a has .*\(no space left on device\)"
            ):
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

    asyncio.run(main())


def test_tasks_without_a_worker_fail_only_if_none_can_come() -> None:
    async def main() -> None:
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

    asyncio.run(main())
