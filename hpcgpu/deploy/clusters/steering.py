"""The part of one cluster object in steering the jobs that come and go: it does, or follows who does."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable
from typing import Any

from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.errors import HpcGpuError, JobError

_AGAIN_S = 0.5


class Steering:
    """Holds a connection to the scheduler, which says who steers (processes.helm).

    Parameters
    ----------
    scheduler : callable
        Returns the connection pool to the scheduler of now.
    fleet : Fleet
        Acts while this object steers. Without a scheduler nobody does.

    """

    def __init__(self, scheduler: Callable[[], Any], fleet: Fleet) -> None:
        self._scheduler, self._fleet = scheduler, fleet
        self._comm: Any = None
        self._told = asyncio.Event()
        self._answers: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._keep())

    async def started(self) -> None:
        """Wait until it is known who steers."""
        await self._told.wait()

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Want so many jobs, here or where the jobs are steered; what must be has been submitted on return."""
        await self.started()
        if not self._fleet.steers:
            await self._scheduler().hpcgpu_scale(jobs=jobs, adapting=adapting)
            return
        try:
            await self._fleet.scale(jobs, adapting=adapting)
        finally:
            with contextlib.suppress(OSError):  # it is told again when there is a scheduler again
                await self._comm.write({"op": "wanted", "jobs": self._fleet.wanted})

    def stop(self) -> None:
        """Leave it to others."""
        for task in (self._task, *self._answers):
            task.cancel()
        if self._comm:
            self._comm.abort()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._comm = await self._scheduler().live_comm()
                await self._comm.write({"op": "hpcgpu_helm"})
                while True:
                    await self._hear(await self._comm.read())
            self._told.clear()
            self._fleet.steers = False
            await asyncio.sleep(_AGAIN_S)

    async def _hear(self, message: dict[str, Any]) -> None:
        if message["op"] == "scale":
            task = asyncio.create_task(self._answer(message["number"], message["jobs"], message["adapting"]))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)
            return
        self._fleet.take(message["wanted"], steers=message["op"] == "steer")
        self._told.set()
        if self._fleet.steers and message["wanted"] is None:
            await self._comm.write({"op": "wanted", "jobs": self._fleet.wanted})

    async def _answer(self, number: int, jobs: int, adapting: bool) -> None:
        error = b""
        try:
            await self.scale(jobs, adapting=adapting)
        except Exception as e:  # who asked waits for an answer, whatever it is
            error = pickle.dumps(e if isinstance(e, HpcGpuError) else JobError(f"the jobs could not be scaled: {e!r}"))
        with contextlib.suppress(OSError):
            await self._comm.write({"op": "scaled", "number": number, "error": error})
