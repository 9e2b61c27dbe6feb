"""Connections of distributed whose other end is a test."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.comm import CommClosedError


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
