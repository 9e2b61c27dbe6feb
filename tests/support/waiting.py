"""Waits of tests, with limits for this machine, and without time; work beside a test; log records of a test."""

import asyncio
import logging
import os
import selectors
import threading
import time
import timeit
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
# A loop of a million additions on the machine for which the limits were chosen (2026-11-26, Python 3.11).
_LOOP_S = 0.066
# For a test's processes: every 2 s an answer without workers replaces what Client.scheduler_info asked for, sometimes
# before it is returned (distributed 2026.8.0, Client._update_scheduler_info).
STEADY = {"DASK_DISTRIBUTED__CLIENT__SCHEDULER_INFO_INTERVAL": "1h"}


def _measured_slowness() -> float:
    """Return how much slower this machine is now than that one, at least 1; child processes read it."""
    if "HPCGPU_SLOWNESS" not in os.environ:
        walls_s = timeit.repeat("sum(number + 1 for number in range(1_000_000))", number=1)  # five of them
        os.environ["HPCGPU_SLOWNESS"] = f"{max(1.0, sorted(walls_s)[2] / _LOOP_S):.2f}"
    return float(os.environ["HPCGPU_SLOWNESS"])


SLOWNESS = _measured_slowness()


def scaled(seconds: float) -> float:
    """Return the limit of a wait on this machine, in seconds."""
    return seconds * SLOWNESS


LIMIT_S = scaled(60)


class Said:
    """What the test has printed so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._text = capsys, ""

    @property
    def text(self) -> str:
        more = self._capsys.readouterr()
        self._text += more.out + more.err
        return self._text


def aside(call: Callable[[], object]) -> Future:
    """Have something done beside the test; a thread of a pool would be waited for, also where the test has failed."""
    done: Future = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return done


def until(
    condition: Callable[[], T],
    what: str,
    while_: Future | None = None,  # when it fails, so does the wait
    *,
    limit_s: float = 60,
    every_s: float = 0.05,
    shown: Callable[[], object] = str,  # its value is in the error
) -> T:
    """Wait for a condition that nothing tells of, and return what it returned."""
    limit_s = scaled(limit_s)
    end_s = time.monotonic() + limit_s
    while not (found := condition()):
        if while_ is not None and while_.done():
            while_.result()
        assert time.monotonic() < end_s, f"waited {limit_s:g} s in vain: {what}; it is {found!r} {shown()}"
        time.sleep(every_s)
    return found


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    """Return what a coroutine function returns, in an event loop of its own, within ``LIMIT_S`` seconds."""

    async def within() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await body()

    return asyncio.run(within())


async def when(condition: Callable[[], object]) -> None:
    """Wait for a condition that nothing tells of; :func:`run` has the limit."""
    while not condition():
        await asyncio.sleep(0.01)


class VirtualTime(selectors.DefaultSelector):
    """The clock and selector of a loop without sockets and programs: its waits move the clock, and take no time."""

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


def logged(log: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[logging.LogRecord]:
    """Return this test's records but asyncio's, which may be about an earlier test."""
    return [r for r in log.records if r.levelno >= level and r.name != "asyncio"]


def failures(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages with a traceback."""
    return [r.getMessage() for r in logged(log) if r.exc_info]


def failure(log: pytest.LogCaptureFixture) -> str:
    """Return the only message with a traceback."""
    (message,) = failures(log)
    return message
