"""A clock that moves on only where an event loop would wait: a minute of a loop takes milliseconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


class VirtualTime(selectors.DefaultSelector):
    """The selector of a loop without sockets and programs."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "the loop waits for ever"
        self.now_s += max(0.0, timeout)
        return super().select(0)

    def run(self, body: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
        """Return what a coroutine function returns in a loop of this time; calls in threads are made at once."""
        loop = asyncio.SelectorEventLoop(self)

        async def at_once(call: Callable[..., Any], *args: object) -> Any:
            return call(*args)

        with monkeypatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
            patch.setattr(time, "monotonic", lambda: self.now_s)
            patch.setattr(loop, "run_in_executor", lambda _, *call: loop.create_task(at_once(*call)))
            return runner.run(body())
