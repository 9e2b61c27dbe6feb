"""A worker that closes says nothing of the sign of life that was under way to a slow scheduler."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from distributed import Scheduler
from waiting import scaled

from hpcgpu.deploy.processes.worker import SilentWorker


class _Slow(Scheduler):
    """Answers no sign of life after the worker has registered until it is told to."""

    def hold(self) -> None:
        self.heard, self.answering = asyncio.Event(), asyncio.Event()
        answer = self.handlers["heartbeat_worker"]

        async def heartbeat_worker(*args: object, **kwargs: object) -> object:
            self.heard.set()
            await self.answering.wait()
            return answer(*args, **kwargs)

        self.handlers["heartbeat_worker"] = heartbeat_worker


@pytest.mark.parametrize("missing", [False, True])
def test_a_sign_of_life_under_way_ends_with_the_worker(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, *, missing: bool
) -> None:
    async def run() -> None:
        async with _Slow(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
            scheduler.hold()
            options = {"host": "127.0.0.1", "local_directory": str(tmp_path), "heartbeat_interval": "20ms"}
            worker = await SilentWorker(scheduler.address, **options)
            await asyncio.wait_for(scheduler.heard.wait(), scaled(30))
            if missing:  # the answer is that the scheduler does not know the worker, which then closes itself
                await scheduler.remove_worker(worker.address, stimulus_id="test", close=False)
                scheduler.answering.set()
                await asyncio.wait_for(worker.finished(), scaled(30))
            else:
                await asyncio.wait_for(worker.close(nanny=False), scaled(30))
            scheduler.answering.set()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    names = ("distributed.worker", "tornado.application", "asyncio")
    messages = [r.getMessage() for r in caplog.records if r.name in names]
    assert messages == (["Scheduler was unaware of this worker; shutting down."] if missing else [])
