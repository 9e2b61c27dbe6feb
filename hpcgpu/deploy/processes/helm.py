"""Who steers the jobs that come and go when several objects hold one cluster: who came first, then the next."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from typing import Any

from hpcgpu.errors import JobError

_NOBODY = "no process steers this cluster's jobs: the last one has ended, or has lost its connection; try again"


class Helm:
    """The scheduler's side: the cluster objects' connections, of which the first steers, and who does is told.

    To an object goes ``steer`` or ``follow`` with the jobs that are wanted, and to the first ``scale``. From one come
    ``wanted``, after each change, and ``scaled`` with what went wrong.
    """

    def __init__(self) -> None:
        self._comms: list[Any] = []
        self._wanted: int | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Any, asyncio.Future[bytes | None]]] = {}

    async def serve(self, comm: Any) -> None:  # noqa: ANN401 - distributed has no types
        """Hold an object's connection (``hpcgpu_helm``) until it ends."""
        self._comms.append(comm)
        try:
            with contextlib.suppress(OSError):
                await self._tell(comm)
                while True:
                    await self._hear(comm, await comm.read())
        finally:  # whatever ended it: the others must not wait for this one
            await self._leave(comm)

    async def scale(self, jobs: int, adapting: bool) -> None:
        """Have the one that steers want so many jobs (``hpcgpu_scale``); if it ends in the middle, then the next one.

        Raises
        ------
        HpcGpuError
            What it raised; or nobody is left, not even the one that asks.

        """
        while self._comms:
            number, steers = next(self._numbers), self._comms[0]
            answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
            self._asked[number] = steers, answer
            with contextlib.suppress(OSError):  # its end is noticed where it is served
                await steers.write({"op": "scale", "number": number, "jobs": jobs, "adapting": adapting})
            if (error := await answer) is not None:
                if error:
                    raise pickle.loads(error)
                return
        raise JobError(_NOBODY)

    async def _hear(self, comm: Any, message: dict[str, Any]) -> None:  # noqa: ANN401
        if message["op"] == "scaled":
            self._asked.pop(message["number"])[1].set_result(message["error"])
        elif comm is self._comms[0]:
            self._wanted = message["jobs"]
            for other in self._comms[1:]:
                with contextlib.suppress(OSError):
                    await self._tell(other)

    async def _leave(self, comm: Any) -> None:  # noqa: ANN401
        steered = self._comms[0] is comm
        self._comms.remove(comm)
        if steered and self._comms:
            with contextlib.suppress(OSError):
                await self._tell(self._comms[0])
        for number, (asked, answer) in list(self._asked.items()):  # the next one has been told that it steers
            if asked is comm:
                del self._asked[number]
                answer.set_result(None)

    async def _tell(self, comm: Any) -> None:  # noqa: ANN401
        await comm.write({"op": "steer" if comm is self._comms[0] else "follow", "wanted": self._wanted})
