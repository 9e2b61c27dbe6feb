"""Carry many TCP connections over one pair of pipes, for nodes whose ports cannot be reached from outside.

A frame is a connection's number, a length, and so many bytes; an empty one ends the connection. ``python -m
hpcgpu.host.relay PORT`` is the far end: it connects to that port of its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import struct
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import IO, Self

from hpcgpu import supervise

_HEAD = struct.Struct("!II")
_CHUNK_BYTES = 1 << 16
# A client or browser sends at once. Neighbours who send nothing may not keep all descriptors of this process.
_MOST_WAITING = 64
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


def ssh_command(port: int, environ: Mapping[str, str], host: str) -> str:
    """Return the command that leads a port of the user's machine to this loopback; "" if the user is here.

    In a job it goes through the node from which the job was submitted. Remote VS Code may have come by a tunnel.
    """
    login = environ.get("SLURM_SUBMIT_HOST") or environ.get("PBS_O_HOST") or host
    if login == host and not environ.keys() & {"SSH_CONNECTION", "VSCODE_AGENT_FOLDER"}:
        return ""
    return f"ssh -N -L {port}:127.0.0.1:{port} {f'-J {login} ' * (login != host)}{host}"


class Newcomers(OrderedDict[asyncio.StreamWriter, None]):
    """Accepted connections that have sent nothing yet; the oldest of more than 64 is closed."""

    async def first(self, writer: asyncio.StreamWriter, read: Awaitable[bytes]) -> bytes:
        """Return what ``read`` returns, the first bytes of a connection; b"" if none come."""
        self[writer] = None
        if len(self) > _MOST_WAITING:
            self.popitem(last=False)[0].transport.abort()
        try:
            return await read
        except (OSError, EOFError, asyncio.LimitOverrunError):
            return b""
        finally:
            self.pop(writer, None)


class Mux:
    """One end of the relay, with its pipes; ``connect`` opens the target of the other end's connections."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connect: Connect | None = None,
    ) -> None:
        self._reader, self._writer, self._connect = reader, writer, connect
        self._next = 0  # the number of the next connection: none has a number twice
        self._newcomers = Newcomers()
        self._open: dict[int, asyncio.StreamWriter] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    @classmethod
    async def over(cls, source: IO[bytes], target: IO[bytes], connect: Connect | None = None) -> Self:
        """Make one end of the relay over two pipes, which it closes."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, target)
        return cls(reader, asyncio.StreamWriter(transport, protocol, None, loop), connect)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection that was accepted here, until it ends."""
        if not (first := await self._newcomers.first(writer, reader.read(_CHUNK_BYTES))):
            writer.close()
            return
        number, self._next = self._next, self._next + 1
        self._open[number] = writer
        self._send(number, first)
        await self._pump(number, reader)

    async def run(self) -> None:
        """Dispatch frames from the other end until the pipe ends; then all connections have ended."""
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    number, length = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                    await self._take(number, await self._reader.readexactly(length))
        finally:  # whatever ended it: no connection may wait for an answer
            for writer in (*self._newcomers, *self._open.values()):
                writer.close()

    async def _take(self, number: int, data: bytes) -> None:
        if number not in self._open:
            if self._connect is None or number < self._next:
                return  # it has ended here, which the other end does not know yet
            self._next = number + 1
            try:
                reader, self._open[number] = await self._connect()
            except OSError:
                self._send(number, b"")
                return
            pump, name = functools.partial(self._pump, number, reader), f"the relay's connection {number}"
            supervise.start(pump, name, supervise.only_log, self._pumps)  # it ends in any case
        writer = self._open[number]
        if not data:
            writer.close()
            del self._open[number]
            return
        writer.write(data)
        with contextlib.suppress(ConnectionError):  # this one has ended, which its pump sees; the others go on
            await writer.drain()

    async def _pump(self, number: int, reader: asyncio.StreamReader) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_CHUNK_BYTES):
                    self._send(number, data)
                    await self._writer.drain()
        finally:
            self._send(number, b"")
            if writer := self._open.pop(number, None):
                writer.close()

    def _send(self, number: int, data: bytes) -> None:
        self._writer.write(_HEAD.pack(number, len(data)) + data)


async def serve(port: int) -> None:
    """Run the far end on stdin and stdout."""
    connect = functools.partial(asyncio.open_connection, "127.0.0.1", port)
    await (await Mux.over(sys.stdin.buffer, sys.stdout.buffer, connect)).run()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
