"""Lines of JSON over a control socket, between a rank and a process that it forked."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any


class Control:
    """One end of a control socket, for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, sock: socket.socket) -> Control:
        """Take over ``sock``."""
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, op: str, **fields: object) -> None:
        """Send one message; a peer that is gone is noticed by who reads."""
        if not self._writer.is_closing():
            self._writer.write(encode(op, **fields))

    async def drained(self) -> None:
        """Wait until what was sent has been handed to the kernel."""
        await self._writer.drain()

    async def messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield messages until the other side closes."""
        try:
            while line := await self._reader.readline():
                yield json.loads(line)
        except ConnectionError:
            return

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


def encode(op: str, **fields: object) -> bytes:
    """Return the bytes of one message."""
    return json.dumps({"op": op, **fields}).encode() + b"\n"
