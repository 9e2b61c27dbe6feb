"""The registration of a node's nannies with their scheduler: by one connection for all, which they hold together.

distributed's Nanny (2025.4 to 2026.8.0, start_unsafe) makes one of its own: it is told the plugins for nannies, and the
scheduler holds back later ones until that connection ends, so that none is missed by a nanny that starts. It was a
third of a join's CPU time in the scheduler (docs/explanation/scale.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

from distributed import Nanny, Security, connect
from distributed.comm import Comm, CommClosedError


class Registration:
    """A context in which nannies start; its connection ends when all have."""

    def __init__(self, scheduler: str, security: Security) -> None:
        self._scheduler, self._arguments = scheduler, security.get_connection_args("worker")
        self._lock = asyncio.Lock()
        self._comm: Comm | None = None
        self._answer: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._comm:
            with contextlib.suppress(OSError):  # the scheduler is gone, which is seen elsewhere
                await self._comm.write({"status": "ok"})
            await self._comm.close()

    def take(self, nanny: Nanny) -> None:
        """Have a nanny register by this: by its first connection after its preloads, which may use others."""
        start = nanny.preloads.start

        async def start_preloads() -> None:
            await start()
            nanny.rpc.connect = share

        async def share(_: str) -> _Share:
            del nanny.rpc.connect  # the pool's own is for all later ones
            return _Share(self)

        nanny.preloads.start = start_preloads

    async def ask(self, message: dict[str, Any]) -> tuple[Comm, Any]:
        """Return the connection, and the answer to the first nanny's message on it; raise OSError if it breaks."""
        async with self._lock:
            if self._comm is None or self._comm.closed():
                comm = await connect(self._scheduler, **self._arguments)
                try:
                    await comm.write(message)
                    self._answer = await comm.read()
                except BaseException:
                    comm.abort()
                    raise
                self._comm = comm
            return self._comm, self._answer


class _Share:
    """A nanny's part in the connection, with the methods of one that it uses."""

    name = ""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration

    async def write(self, message: dict[str, Any]) -> None:
        if "op" in message:
            self._comm, self._answer = await self._registration.ask(message)
        elif self._comm.closed():
            raise CommClosedError("the connection of this node's nannies to their scheduler has ended")

    async def read(self) -> Any:
        return self._answer

    async def close(self) -> None:
        """Leave it to the others."""
