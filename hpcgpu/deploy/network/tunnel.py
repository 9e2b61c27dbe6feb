"""Reach a scheduler whose port is closed to this machine: through the batch system, onto its node."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

from hpcgpu import supervise
from hpcgpu.host.relay import Mux

_HOST = "127.0.0.1"
_ENDING_S = 5.0


class Tunnel:
    """A loopback port of this machine that leads to a port of a node, through the stdin and stdout of a relay there.

    Any process that reaches the port still needs the cluster's certificate.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, server: asyncio.Server, carrying: asyncio.Task[None]
    ) -> None:
        self._process, self._server, self._carrying = process, server, carrying
        self.address = f"{_HOST}:{server.sockets[0].getsockname()[1]}"

    @classmethod
    async def open(cls, argv: tuple[str, ...]) -> Self:
        """Start the relay by its command, and listen."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe)
        assert process.stdin
        assert process.stdout
        mux = Mux(process.stdout, process.stdin)
        server = await asyncio.start_server(mux.carry, _HOST, 0)
        # however it ends, it closes all connections: their users look for the scheduler again
        return cls(process, server, supervise.start(mux.run, "the tunnel to the scheduler's node", supervise.only_log))

    async def failure(self) -> str:
        """Return the relay's error once it has ended; "" while it runs."""
        if self._carrying.done():  # its end of the pipe is closed: it is ending, but may not have ended yet
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _ENDING_S)
        if self._process.returncode is None or self._process.stderr is None:
            return ""
        error = (await self._process.stderr.read()).decode(errors="replace").strip()
        return error or f"it ended with exit code {self._process.returncode}"

    async def close(self) -> None:
        """End the relay and stop listening."""
        self._server.close()
        self._carrying.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()
