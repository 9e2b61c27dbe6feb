"""The state of a cluster object in words: not started, not connected, stalled, lost, detached, closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from distributed.core import Status

from hpcgpu.errors import ConfigError, JobError
from hpcgpu.plan.jobs.phase import End


class State:
    """How a cluster object ended, or what is wrong with it now. The event loop's thread changes it; any may read it."""

    def __init__(self, kind: str, status: Callable[[], Status], reason: Callable[[], str]) -> None:
        """Take the name of the cluster's class, and functions for distributed's status and why no task goes on."""
        self.kind, self._status, self._reason = kind, status, reason
        self.end: End | None = None  # None while it has a scheduler or searches it
        self.end_text = ""  # the end, for people
        self.trouble = ""  # why there is no connection to the scheduler at present

    def check_loop(self, *, asynchronous: bool, loop: object) -> None:
        """Raise ConfigError if an asynchronous cluster has no event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if not asynchronous or loop is not None:
                return
            raise ConfigError(
                f"asynchronous=True outside of an event loop: leave it out, or write 'cluster = await "
                f"{self.kind}(asynchronous=True, ...)' in a coroutine"
            ) from None

    def over(self, end: End, text: str) -> None:
        """Record that there is no scheduler from now on."""
        self.end, self.end_text, self.trouble = end, text, ""

    def named(self, observed: Iterable[object], count: int) -> set[str]:
        """Return names for ``count`` workers; workers that have not registered yet have none of their own."""
        names = {str(name) for name in observed}
        return names | {f"not registered yet, {i}" for i in range(len(names), 0 if self.end else count)}

    @property
    def text(self) -> str:
        """Why the cluster is unusable, or no task goes on; "" if it is usable."""
        status = self._status()
        if self.end:
            return self.end_text
        if status == Status.created:
            return "not started: await it"
        if status == Status.running:
            return f"not connected: {self.trouble}" if self.trouble else self.stalled
        return str(status.name)

    @property
    def stalled(self) -> str:
        """Why no task goes on; "" if one does. The status stays: distributed's loops end when it changes."""
        reason = "" if self.trouble or self._status() != Status.running else self._reason()
        return f"stalled: {reason}" if reason else ""

    def must_run(self) -> None:
        """Raise ConfigError if the cluster has not been started, JobError if it is lost or closed."""
        status = self._status()
        if self.end or status == Status.closing:
            raise JobError(f"this {self.kind} is {self.text}")
        if status in (Status.created, Status.starting):
            raise ConfigError(
                f"this {self.kind} has not started yet: it is asynchronous, so write 'cluster = await "
                f"{self.kind}(...)', or 'async with', before you use it"
            )


def without_workers(info: Any) -> Any:  # distributed's SchedulerInfo, or a dict
    """Return the scheduler's facts about itself, without workers."""
    none = {name: 0 for name in ("n_workers", "total_threads", "total_memory") if name in info}
    return type(info)({**info, **none, "workers": {}})


def first_line(text: str) -> str:
    """Return the first line of a state, without the colon at its end."""
    return text.partition("\n")[0].rstrip(":")
