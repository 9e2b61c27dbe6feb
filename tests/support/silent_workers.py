"""Workers that a scheduler has registered, without processes and network; they say nothing more."""

import asyncio
import time
from typing import Any

from crowd import METRICS
from distributed import Scheduler
from distributed.comm import CommClosedError
from waiting import when


class Silent:
    """A connection of a worker that says nothing more, and is closed."""

    member: asyncio.Task[None]
    metrics: dict[str, Any]  # of its registration
    peer_address = "tls://127.0.0.1:1"

    def __init__(self) -> None:
        self.welcome: dict[str, Any] = {}
        self.news: list[list[dict[str, Any]]] = []  # the batches of messages that came after it
        self._end = asyncio.Event()

    async def write(self, message: Any, **_: Any) -> int:
        if self.welcome:
            self.news.append(message)
        self.welcome = self.welcome or message
        return 0

    async def read(self, **_: Any) -> Any:
        await self._end.wait()
        raise CommClosedError

    def closed(self) -> bool:
        return self._end.is_set()

    async def close(self) -> None:
        self._end.set()

    def abort(self) -> None:
        self._end.set()

    async def leave(self) -> None:
        await self.close()
        await self.member


async def join(scheduler: Scheduler, number: int, packages: dict[str, Any]) -> Silent:
    comm, name = Silent(), f"worker-{number}"
    facts: dict[str, Any] = {"status": "running", "server_id": name, "name": name, "nthreads": 1, "nanny": None}
    facts |= {"now": time.time(), "metrics": dict(METRICS), "memory_limit": 1 << 30, "local_directory": ""}
    facts |= {
        "resources": {},
        "extra": {},
        "services": {},
        "versions": {"packages": packages},
        "stimulus_id": name,
        "resolve_address": False,
    }
    comm.metrics = facts["metrics"]
    comm.member = asyncio.create_task(scheduler.add_worker(comm=comm, address=f"tls://127.0.0.1:{number}", **facts))
    await when(lambda: comm.welcome)
    return comm
