"""The state of a cluster object in words: not started, not connected, stalled, lost, detached, closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from distributed.core import Status

from hpcgpu.errors import ConfigError, JobError
from hpcgpu.plan.jobs.phase import End


class State:
    """How a cluster object ended, or what is wrong with it now.

    The event loop's thread changes it; any thread may read it.

    Parameters
    ----------
    kind : str
        Name of the cluster's class, for errors.
    status : callable
        Returns distributed's status of the object.
    reason : callable
        Returns why no task goes on, as the scheduler says it; empty when one does.

    Attributes
    ----------
    kind : str
        Name of the cluster's class.
    end : End or None
        How it ended; None while it has a scheduler or looks for one.
    end_words : str
        The same for people.
    trouble : str
        Why there is no connection to the scheduler at present; empty when there is one.

    """

    def __init__(self, kind: str, status: Callable[[], Status], reason: Callable[[], str]) -> None:
        self.kind, self._status, self._reason = kind, status, reason
        self.end: End | None = None
        self.end_words = self.trouble = ""

    def check_loop(self, *, asynchronous: bool, loop: object) -> None:
        """Raise where an asynchronous cluster has no event loop.

        Raises
        ------
        ConfigError
            There is none.

        """
        if asynchronous and loop is None and not _in_event_loop():
            raise ConfigError(
                f"asynchronous=True outside of an event loop: leave it out, or write 'cluster = await "
                f"{self.kind}(asynchronous=True, ...)' in a coroutine"
            )

    def over(self, end: End, words: str) -> None:
        """Note that there is no scheduler from now on."""
        self.end, self.end_words, self.trouble = end, words, ""

    def named(self, observed: Iterable[object], count: int) -> set[str]:
        """Return names of so many workers; those that are not there yet have none of their own."""
        there = {str(name) for name in observed}
        return there | {f"not there yet, {i}" for i in range(len(there), 0 if self.end else count)}

    @property
    def text(self) -> str:
        """The words for a cluster that cannot be used now, or is of no use; empty for another."""
        status = self._status()
        if self.end:
            return self.end_words
        if status == Status.created:
            return "not started: await it"
        if status == Status.running:
            return f"not connected: {self.trouble}" if self.trouble else self.stalled
        return str(status.name)

    @property
    def stalled(self) -> str:
        """Why no task goes on; empty when one does.

        The status stays: distributed's loops end where it changes.
        """
        reason = "" if self.trouble or self._status() != Status.running else self._reason()
        return f"stalled: {reason}" if reason else ""

    def must_run(self) -> None:
        """Raise unless the scheduler is there, or looked for.

        Raises
        ------
        ConfigError
            The cluster has not been started.
        JobError
            It is lost or closed.

        """
        status = self._status()
        if self.end or status == Status.closing:
            raise JobError(f"this {self.kind} is {self.text}")
        if status in (Status.created, Status.starting):
            raise ConfigError(
                f"this {self.kind} has not started yet: it is asynchronous, so write 'cluster = await "
                f"{self.kind}(...)', or 'async with', before you use it"
            )


def without_workers(info: Any) -> Any:  # distributed's SchedulerInfo, or a dict
    """Return what the scheduler says of itself, with no worker."""
    none = {name: 0 for name in ("n_workers", "total_threads", "total_memory") if name in info}
    return type(info)({**info, **none, "workers": {}})


def first_line(text: str) -> str:
    """Return the first line of a state, without the colon at its end."""
    return text.partition("\n")[0].rstrip(":")


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
