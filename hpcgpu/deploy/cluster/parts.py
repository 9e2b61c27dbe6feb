"""The parts of a cluster object, and its state: not started, not connected, stalled, lost, detached, closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distributed.core import Status

from hpcgpu import supervise
from hpcgpu.deploy import workers
from hpcgpu.deploy.cluster import ClusterRun
from hpcgpu.deploy.cluster.connection import Connection
from hpcgpu.deploy.dashboard import KEY
from hpcgpu.deploy.progress import Progress
from hpcgpu.errors import ConfigError, JobError
from hpcgpu.plan.jobs import by_number
from hpcgpu.plan.jobs.phase import End
from hpcgpu.report.summary import Summary
from hpcgpu.report.workers import WorkerFacts, read_facts
from hpcgpu.supervise import reason_of

_ANSWER_S = 3.0
# The scheduler waits 1 s at most for the workers' last heartbeats.
_SUMMARY_S = 3.0
# A question to one worker costs the scheduler 0.8 CPU ms (8 workers on 2 cores, distributed 2026.8.0): a hundredth.
_SHORTEST_S, _PER_WORKER_S = 2.0, 0.08


class Answers:
    """The newest facts of the workers, for the page, and the newest summary.

    The event loop's thread asks; any thread may read. ``kind`` is the name of the cluster's class, for errors.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._summary: Summary | str = "it has not been started"
        self._facts: dict[str, WorkerFacts] = {}  # by address
        self._asked_s = 0.0
        self._asking: supervise.Loop | None = None
        self.show_end: Callable[[], object] = lambda: None  # updates a widget that shows the page when the cluster ends

    def workers(self, present: Mapping[str, Any]) -> list[WorkerFacts]:
        """Return the facts of the present workers; of those that have not answered, the scheduler's facts."""
        shown = [
            self._facts.get(address) or read_facts(str(facts["name"]), {"node": facts["host"]}, facts.get(KEY, {}))
            for address, facts in present.items()
        ]
        return sorted(shown, key=lambda w: by_number(w.name))

    def is_due(self, count: int) -> bool:
        """Return whether the facts are old."""
        return time.monotonic() - self._asked_s >= max(_SHORTEST_S, _PER_WORKER_S * count)

    async def ask_workers(self, scheduler: Any) -> None:  # distributed's rpc
        """Ask all workers; those that do not answer are shown by their names."""
        self._asked_s = time.monotonic()
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = await workers.ask(scheduler)
        except (OSError, TimeoutError):
            return
        self._facts = {a: facts for a, facts in answers.items() if isinstance(facts, WorkerFacts)}

    def keep(self, scheduler: Callable[[], Any], count: Callable[[], int]) -> None:
        """Ask again and again, on the event loop: a widget shows the page.

        The functions return the connection to the scheduler, and the number of workers.
        """
        if self._asking is None:

            async def ask() -> None:
                await asyncio.sleep(_SHORTEST_S)
                if self.is_due(count()):
                    await self.ask_workers(scheduler())

            self._asking = supervise.Loop(ask, "the questions to the workers for a notebook")

    def close(self) -> None:
        """Stop asking."""
        if self._asking:
            self._asking.cancel()
        self._facts = {}

    async def ask_summary(self, scheduler: Any) -> None:
        """Ask the scheduler (distributed's rpc, or None); an error is kept as the reason and ends nothing else."""
        if scheduler is None:
            return
        try:
            async with asyncio.timeout(_SUMMARY_S):
                self._summary = Summary(**await scheduler.hpcgpu_summary())
        except Exception as e:  # of a connection that is gone, or of a scheduler that closes
            if not isinstance(self._summary, Summary):
                self._summary = f"its scheduler does not answer: {reason_of(e)}"

    def summary(self) -> Summary:
        """Return the newest summary; raise JobError, with the reason, without one."""
        if isinstance(self._summary, str):
            raise JobError(f"this {self._kind} has no summary: {self._summary}")
        return self._summary


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of one cluster object, by which its classes reach each other's work, and how it ended.

    The event loop's thread changes it; any may read it.
    """

    kind: str  # name of the cluster's class
    run: ClusterRun  # its jobs or processes
    connection: Connection  # folder, lease, connection
    progress: Progress  # prints its lines
    answers: Answers  # of its workers and scheduler
    status: Callable[[], Status]  # return distributed's status
    reason: Callable[[], str]  # return why no task goes on
    end: End | None = None  # None while it has a scheduler or searches it
    end_text: str = ""  # the end, for people

    def over(self, end: End, text: str) -> None:
        """Record that there is no scheduler from now on."""
        self.end, self.end_text, self.connection.why_lost = end, text, ""

    def named(self, observed: Iterable[object], count: int) -> set[str]:
        """Return names for ``count`` workers; workers that have not registered yet have none of their own."""
        names = {str(name) for name in observed}
        return names | {f"not registered yet, {i}" for i in range(len(names), 0 if self.end else count)}

    @property
    def state(self) -> str:
        """Why the cluster is unusable, or no task goes on; "" if it is usable."""
        status, why = self.status(), self.connection.why_lost
        if self.end:
            return self.end_text
        if status == Status.created:
            return "not started: await it"
        if status == Status.running:
            return f"not connected: {why}" if why else self.stalled
        return str(status.name)

    @property
    def stalled(self) -> str:
        """Why no task goes on; "" if one does. The status stays: distributed's loops end when it changes."""
        reason = "" if self.connection.why_lost or self.status() != Status.running else self.reason()
        return f"stalled: {reason}" if reason else ""

    def must_run(self) -> None:
        """Raise ConfigError if the cluster has not been started, JobError if it is lost or closed."""
        status = self.status()
        if self.end or status == Status.closing:
            raise JobError(f"this {self.kind} is {self.state}")
        if status in (Status.created, Status.starting):
            raise ConfigError(
                f"this {self.kind} has not started yet: it is asynchronous, so write 'cluster = await "
                f"{self.kind}(...)', or 'async with', before you use it"
            )


def check_loop(kind: str, *, asynchronous: bool, loop: object) -> None:
    """Raise ConfigError if an asynchronous cluster has no event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if not asynchronous or loop is not None:
            return
        raise ConfigError(
            f"asynchronous=True outside of an event loop: leave it out, or write 'cluster = await "
            f"{kind}(asynchronous=True, ...)' in a coroutine"
        ) from None


def without_workers(info: Any) -> Any:  # distributed's SchedulerInfo, or a dict
    """Return the scheduler's facts about itself, without workers."""
    none = {name: 0 for name in ("n_workers", "total_threads", "total_memory") if name in info}
    return type(info)({**info, **none, "workers": {}})


def first_line(text: str) -> str:
    """Return the first line of a state, without the colon at its end."""
    return text.partition("\n")[0].rstrip(":")
