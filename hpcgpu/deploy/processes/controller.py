"""Elect the cluster object that controls the jobs, and retire their workers.

Several objects may hold one cluster. The first of them is the controller; when it is gone, the next one is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

from distributed import Scheduler

from hpcgpu.errors import JobError

_NO_OBJECT = "no process controls this cluster's jobs: the last one has ended, or has lost its connection; try again"
_LOOK_S = 0.1


class ControllerElection:
    """The scheduler's side: hold the cluster objects' connections, and tell each whether it is the controller.

    An object gets ``control`` or ``observe`` with the number of wanted jobs, and the controller ``scale``. The
    controller sends ``wanted`` after each change, and ``scaled`` with an error, if any.
    """

    def __init__(self) -> None:
        self._comms: list[Any] = []  # the controller's first
        self._jobs: int | None = None
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Any, asyncio.Future[bytes | None]]] = {}

    async def serve(self, comm: Any) -> None:  # distributed has no types
        """Hold an object's connection (``hpcgpu_controller``) until it ends."""
        self._comms.append(comm)
        try:
            with contextlib.suppress(OSError):
                await self._tell(comm)
                while True:
                    await self._hear(comm, await comm.read())
        finally:  # after any end: the others must not wait for this one
            await self._leave(comm)

    async def scale(self, jobs: int, adapting: bool) -> None:
        """Make the controller want ``jobs`` jobs (``hpcgpu_scale``); if it ends meanwhile, ask the next one.

        Raises the controller's HpcGpuError, or JobError if no object is left, not even the caller.
        """
        while self._comms:
            number, controller = next(self._numbers), self._comms[0]
            answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
            self._asked[number] = controller, answer
            with contextlib.suppress(OSError):  # serve() notices its end
                await controller.write({"op": "scale", "number": number, "jobs": jobs, "adapting": adapting})
            if (error := await answer) is not None:
                if error:
                    raise pickle.loads(error)
                return
        raise JobError(_NO_OBJECT)

    async def _hear(self, comm: Any, message: dict[str, Any]) -> None:
        if message["op"] == "scaled":
            self._asked.pop(message["number"])[1].set_result(message["error"])
        elif comm is self._comms[0]:
            self._jobs = message["jobs"]
            for other in self._comms[1:]:
                with contextlib.suppress(OSError):
                    await self._tell(other)

    async def _leave(self, comm: Any) -> None:
        was_controller = self._comms[0] is comm
        self._comms.remove(comm)
        if was_controller and self._comms:
            with contextlib.suppress(OSError):
                await self._tell(self._comms[0])
        for number, (comm_asked, answer) in list(self._asked.items()):  # the next controller knows that it is one
            if comm_asked is comm:
                del self._asked[number]
                answer.set_result(None)

    async def _tell(self, comm: Any) -> None:
        await comm.write({"op": "control" if comm is self._comms[0] else "observe", "wanted": self._jobs})


async def retire(scheduler: Scheduler, workers: Sequence[str]) -> list[str]:
    """Retire workers by address (``hpcgpu_retire``); return those that have left the cluster.

    They get no new tasks, sole replicas are moved elsewhere, then they close; the others hold data that no worker can
    take. distributed's ``retire_workers`` does the same, but checks only every 2 s whether the data has been moved (its
    active memory manager, 2026.8.0). A batch system may leave a cancelled job 5 s.
    """
    leaving = asyncio.create_task(scheduler.retire_workers(workers=list(workers), close_workers=True, remove=True))
    pushed = False
    while not (await asyncio.wait([leaving], timeout=_LOOK_S))[0]:
        amm = scheduler.extensions.get("amm")
        # only once: until the data has arrived, each run requests it again
        if not pushed and amm and amm.running and _is_copied(scheduler, workers):
            pushed = True
            amm.run_once()
    await leaving
    return [address for address in workers if address not in scheduler.workers]


def _is_copied(scheduler: Scheduler, workers: Sequence[str]) -> bool:
    going = {scheduler.workers[address] for address in workers if address in scheduler.workers}
    return all(set(ts.who_has or ()) - going for ws in going for ts in ws.has_what)
