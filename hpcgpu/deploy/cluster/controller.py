"""One cluster object's part in controlling the jobs that come and go: it controls them, or follows another object."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
from collections.abc import Callable
from typing import Any

from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.errors import HpcGpuError, JobError
from hpcgpu.supervise import tasks

_AGAIN_S = 0.5


class Controller:
    """Holds a connection to the scheduler, which says which object controls (processes.controller).

    Parameters
    ----------
    scheduler : callable
        Returns the connection pool to the scheduler of now.
    fleet : Fleet
        Acts while this object controls. Without a scheduler no object does.
    changed : callable
        Called when it is not known any more which object controls.

    """

    def __init__(self, scheduler: Callable[[], Any], fleet: Fleet, changed: Callable[[], object]) -> None:
        self._scheduler, self._fleet, self._changed = scheduler, fleet, changed
        self._comm: Any = None
        self._is_told = False
        self._news = asyncio.Event()
        self._answers = tasks.Group()
        what = "the connection that says which object controls this cluster's jobs"
        self._holding = tasks.run_forever(self._hold, what, changed=self._lose)

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None when they may."""
        trouble = self._fleet.trouble or self._trouble
        return self._fleet.error or (JobError(trouble) if trouble else None)

    @property
    def _trouble(self) -> str:
        """Why it cannot be known which object controls; empty when it can."""
        return "" if self._is_told else self._holding.trouble

    async def started(self) -> None:
        """Wait until it is known which object controls.

        Raises
        ------
        JobError
            It cannot be known.

        """
        while not self._is_told:
            if self._trouble:
                raise JobError(self._trouble)
            self._news.clear()
            await self._news.wait()

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Want so many jobs, here or in the object that controls; return after the necessary submissions."""
        await self.started()
        if not self._fleet.controls:
            await self._scheduler().hpcgpu_scale(jobs=jobs, adapting=adapting)
            return
        try:
            await self._fleet.scale(jobs, adapting=adapting)
        finally:
            with contextlib.suppress(OSError):  # it is told again when there is a scheduler again
                await self._comm.write({"op": "wanted", "jobs": self._fleet.wanted})

    def stop(self) -> None:
        """Leave it to others."""
        self._holding.cancel()
        self._answers.cancel()
        if self._comm:
            self._comm.abort()

    def _lose(self) -> None:
        """Know of no object that controls; the scheduler, too, is to count on this end no more."""
        self._is_told = self._fleet.controls = False
        if self._comm:
            self._comm.abort()
        self._news.set()
        self._changed()

    async def _hold(self) -> None:
        """Be told by a scheduler until the connection ends."""
        with contextlib.suppress(OSError):
            self._comm = await self._scheduler().live_comm()
            await self._comm.write({"op": "hpcgpu_controller"})
            while True:
                await self._hear(await self._comm.read())
        self._lose()
        await asyncio.sleep(_AGAIN_S)

    async def _hear(self, message: dict[str, Any]) -> None:
        if message["op"] == "scale":
            answer = functools.partial(self._answer, message["number"], message["jobs"], message["adapting"])
            # the asking object waits for an answer: the scheduler gives one when the connection ends
            self._answers.start(answer, "the answer to the object that scales this cluster", lambda _: self._lose())
            return
        await self._fleet.take(message["wanted"], controls=message["op"] == "control")
        self._is_told = True
        self._news.set()
        if self._fleet.controls and message["wanted"] is None:
            await self._comm.write({"op": "wanted", "jobs": self._fleet.wanted})

    async def _answer(self, number: int, jobs: int, adapting: bool) -> None:
        error = b""
        try:
            await self.scale(jobs, adapting=adapting)
        except Exception as e:  # the asking object waits for an answer, whatever it is
            error = pickle.dumps(e if isinstance(e, HpcGpuError) else JobError(f"the jobs could not be scaled: {e!r}"))
        with contextlib.suppress(OSError):
            await self._comm.write({"op": "scaled", "number": number, "error": error})
