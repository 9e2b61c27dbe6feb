"""Connections of distributed, and a scheduler of this process, for a test at their other end."""

import asyncio
from collections.abc import Callable
from typing import Any

from distributed import Scheduler
from distributed.comm import CommClosedError

from hpcgpu.deploy.network.scheduler_file import Certificate, security


class Comm:
    """A connection that yields messages, then raises, or stays silent."""

    def __init__(self, *messages: Any, end: Exception | None = None, unwritable: Exception | None = None) -> None:
        self.messages, self.end, self.unwritable = list(messages), end, unwritable
        self.written: list[Any] = []
        self.later: asyncio.Queue[Any] = asyncio.Queue()
        self.aborted = asyncio.Event()

    async def read(self) -> Any:
        if self.messages:
            return self.messages.pop(0)
        if self.end:
            raise self.end
        if (message := await self.later.get()) is None:
            raise CommClosedError("aborted")
        return message

    async def write(self, message: Any) -> None:
        if self.unwritable and message["op"] == "scaled":
            raise self.unwritable
        self.written.append(message)

    def say(self, message: Any) -> None:
        self.later.put_nowait(message)

    def abort(self) -> None:
        self.aborted.set()
        self.say(None)


def knock(scheduler: Certificate, how: Callable[[str], Any]) -> Any:
    """Start a scheduler with a certificate, and come to it."""

    async def main() -> Any:
        trust = security(scheduler)
        async with Scheduler(host="127.0.0.1", port=0, protocol="tls", security=trust, dashboard=False) as started:
            return await how(started.address)

    return asyncio.run(main())
