"""A cluster object's parts and state, and its reports: bindings, memory, a summary, its page in a notebook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster

from hpcgpu import supervise
from hpcgpu.deploy import dashboard
from hpcgpu.deploy.cluster import ClusterRun
from hpcgpu.deploy.cluster.connection import Connection
from hpcgpu.deploy.dashboard import KEY
from hpcgpu.deploy.progress import Progress
from hpcgpu.errors import ConfigError, JobError
from hpcgpu.plan.jobs import End, by_number
from hpcgpu.report.summary import Summary
from hpcgpu.report.workers import WorkerFacts, cluster_page, read_facts
from hpcgpu.supervise import reason_of

_ANSWER_S = 3.0
# The scheduler waits 1 s at most for the workers' last heartbeats.
_SUMMARY_S = 3.0
# A question to one worker costs the scheduler 0.8 CPU ms (8 workers on 2 cores, distributed 2026.8.0): a hundredth.
_SHORTEST_S, _PER_WORKER_S = 2.0, 0.08


class Answers:
    """The newest facts of the workers, for the page, and the newest summary; ``kind`` is the cluster's class."""

    # The event loop's thread asks; any thread may read.

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
                answers = await dashboard.ask(scheduler)
        except (OSError, TimeoutError):
            return
        self._facts = {a: facts for a, facts in answers.items() if isinstance(facts, WorkerFacts)}

    def keep(self, scheduler: Callable[[], Any], count: Callable[[], int]) -> None:
        """Ask again and again about the ``count()`` workers, on the event loop: a widget shows the page."""
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
    """The parts of one cluster object, and how it ended; the event loop's thread changes it, any may read it."""

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


class ReportedCluster(Cluster):
    """distributed's interface to a cluster, with reports about GPUs, and a page in a notebook."""

    parts: Parts  # for the classes of hpcgpu; attributes for people have a name of their own
    scheduler_comm: Any  # distributed's, as scheduler_info
    scheduler_info: Any
    _tab: Any = None  # the widget, once it has been shown

    def bindings(self) -> Any:  # a coroutine of an asynchronous cluster
        """Return what each worker is tied to, planned and actual: read back from the kernel, for all threads.

        Returns
        -------
        hpcgpu.report.workers.Bindings
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self.parts.must_run()
        return self.sync(dashboard.read_bindings, self.scheduler_comm)

    def memory(self) -> Any:
        """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

        Returns
        -------
        hpcgpu.report.workers.Memory
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self.parts.must_run()
        return self.sync(dashboard.read_memory, self.scheduler_comm)

    def trim_memory(self) -> Any:
        """Have all workers give free memory back to the kernel; see :func:`hpcgpu.trim_memory`.

        Returns
        -------
        dict of str to int
            Bytes given back, by worker; an awaitable of it where the cluster is asynchronous.

        """
        self.parts.must_run()
        return self.sync(self._trim)

    async def _trim(self) -> Any:
        with self.parts.progress.waiting("the workers give free memory back"):
            return await dashboard.trim(self.scheduler_comm)

    def summary(self) -> Any:
        """Return what was used: GPU hours, busy share, bytes moved and peaks by tier, restarts; and what to ask for.

        It answers after :meth:`close`, too, with the figures of then.

        Returns
        -------
        hpcgpu.report.summary.Summary
            It prints as a few lines, ``.as_dict()`` and ``.as_json()`` have the figures; an awaitable of it where the
            cluster is asynchronous.

        Raises
        ------
        JobError
            The scheduler was never reached, or is lost.

        """
        asks = self.asynchronous or self._scheduler_answers
        return self.sync(self._summary) if asks else self.parts.answers.summary()

    @property
    def _scheduler_answers(self) -> bool:
        return bool(self.status == Status.running and self.scheduler_comm is not None)

    async def _summary(self) -> Summary:
        if self._scheduler_answers:
            await self.parts.answers.ask_summary(self.scheduler_comm)
        return self.parts.answers.summary()

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        parts, count = self.parts, len(self.scheduler_info["workers"])
        may_wait = self.status == Status.running and not self.asynchronous and not self.called_from_running_loop
        if count and may_wait and parts.answers.is_due(count):
            self.sync(parts.answers.ask_workers, self.scheduler_comm)
        link = parts.connection.browser.url if parts.connection.browser and not parts.end else ""
        if link:  # a line has shown it before
            drop = self.parts.progress.drop
            drop = supervise.log_errors(drop, "removing the line with the dashboard's link", supervise.only_log)
            self.loop.add_callback(drop, f"dashboard: {link}")
        page = cluster_page(
            type(self).__name__,
            self.name,
            first_line(parts.state or self.status.name),
            link,
            parts.run.jobs.table,
            parts.answers.workers(self.scheduler_info["workers"]),
            0 if parts.end else parts.run.wanted_workers,
        )
        return page + (cluster_status or "")

    def _widget(self) -> Any:  # of ipywidgets, or None
        if self.status == Status.running:
            keep = self.parts.answers.keep
            self.loop.add_callback(keep, lambda: self.scheduler_comm, lambda: len(self.scheduler_info["workers"]))
        self._tab = super()._widget()
        if self._tab is not None:
            if not self.parts.run.scales:
                self._tab.children = self._tab.children[:1]  # without the tab for scale and adapt, which are refused
            # distributed no longer updates the widget then
            self.parts.answers.show_end = lambda: setattr(self._tab.children[0], "value", self._repr_html_())
        return self._tab
