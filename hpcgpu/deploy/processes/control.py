"""Control sockets: messages between a process of a run and the children that it has forked."""

from __future__ import annotations

import asyncio
import json
import socket
import traceback
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from hpcgpu.errors import HpcGpuError, cause_of
from hpcgpu.host import process


class Control:
    """One end of a control socket, for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Control:
        """Take over ``sock``."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, op: str, **fields: object) -> None:
        """Send one message; without an error if the peer is gone, which readers notice."""
        if not self._writer.is_closing():
            self._writer.write(encode(op, **fields))

    async def drained(self) -> None:
        """Wait until all sent messages are handed to the kernel."""
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield messages until the peer closes."""
        try:
            while line := await self._reader.readline():
                yield json.loads(line)
        except ConnectionError:
            return

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


def encode(op: str, **fields: object) -> bytes:
    """Encode one message as a line of JSON."""
    return json.dumps({"op": op, **fields}).encode() + b"\n"


def failure_of(error: Exception, advice: str = "") -> dict[str, str]:
    """Return the report to the parent about a process that cannot start: the reason, and a traceback if that helps.

    ``advice`` ends the reason where it is not hpcgpu's own.
    """
    cause = cause_of(error)
    message = str(cause) if isinstance(cause, HpcGpuError) else process.refused(cause)
    reason = message or "".join(traceback.format_exception_only(cause)).strip() + advice
    return {"text": "" if message else "".join(traceback.format_exception(error)), "reason": reason}


@dataclass(slots=True)
class Child:
    """A forked process."""

    pid: int
    control: socket.socket  # stream socket to it; end of file: the peer is gone
    exited: asyncio.Future[int]  # exit code, negative for a signal
