"""A cluster object's state, and its reports: bindings, memory, a summary, its page in a notebook."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from distributed.core import Status
from distributed.deploy.cluster import Cluster

from hpcgpu import supervise
from hpcgpu.deploy.cluster.batch_run import ClusterRun
from hpcgpu.deploy.cluster.connection import Connection
from hpcgpu.deploy.dashboard import worker_requests
from hpcgpu.deploy.dashboard.worker_metrics import KEY
from hpcgpu.deploy.progress import Progress
from hpcgpu.errors import ClosedError, ConfigError, JobError, end_script
from hpcgpu.model.worker_names import by_number
from hpcgpu.plan.jobs.job_text import End, absence, summary_line
from hpcgpu.report.summary import Summary
from hpcgpu.report.table import Explanation
from hpcgpu.report.workers import WorkerFacts, cluster_page, read_facts
from hpcgpu.supervise import reason_of

_ANSWER_S = 3.0
# The scheduler waits 1 s at most for the workers' last heartbeats.
_SUMMARY_S = 3.0
# A question to one worker costs the scheduler 0.8 CPU ms (8 workers on 2 cores, distributed 2026.8.0): a hundredth.
_SHORTEST_S, _PER_WORKER_S = 2.0, 0.08


def first_line(text: str) -> str:
    """Return the first line of a state, without the colon at its end."""
    return text.partition("\n")[0].rstrip(":")


class ReportedCluster(Cluster):
    """distributed's interface to a cluster, with reports about GPUs, and a page in a notebook."""

    scheduler_comm: Any  # distributed's, as scheduler_info
    scheduler_info: Any
    # The event loop's thread changes these; any thread may read.
    _run: ClusterRun  # its jobs or processes
    _connection: Connection  # folder, lease, connection
    _progress: Progress  # prints its lines
    _end: End | None = None  # None while it has a scheduler or searches it
    _end_text = ""  # the end, for people
    _used: Summary | str = "it has not been started"  # the newest summary, or why there is none
    _facts: Mapping[str, WorkerFacts] = MappingProxyType({})  # the workers' newest answers for the page, by address
    _away: Sequence[tuple[str, str]] = ()  # node and reason of each worker that is absent, when it was asked last
    _asked_s = 0.0  # last question to the workers
    _asking: supervise.Loop | None = None  # asks them again and again
    _tab: Any = None  # the widget, once it has been shown

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the object; an error of ours that ends its program is short from now on."""
        if sys.excepthook is sys.__excepthook__ and not os.environ.get("HPCGPU_DEBUG"):  # not that of the user
            sys.excepthook = end_script
        return super().__new__(cls)

    @property
    def _state(self) -> str:
        """Why the cluster is unusable, or no task goes on; "" if it is usable."""
        why = self._connection.why_lost
        if self._end:
            return self._end_text
        if self.status == Status.created:
            return "not started: await it"
        if self.status == Status.running:
            return f"not connected: {why}" if why else self._stalled
        return str(self.status.name)

    @property
    def _stalled(self) -> str:
        """Why no task goes on; "" if one does. The status stays: distributed's loops end when it changes."""
        is_connected = self.status == Status.running and not self._connection.why_lost
        reason = self.scheduler_info.get("stalled", "") if is_connected else ""
        return f"stalled: {reason}" if reason else ""

    def _must_run(self) -> None:
        """Raise ConfigError if the cluster has not been started, JobError if it is lost or closed."""
        kind = type(self).__name__
        if self._end or self.status == Status.closing:
            error = JobError if self._end is End.LOST else ClosedError
            raise error(f"this {kind} is {self._state}")
        if self.status in (Status.created, Status.starting):
            raise ConfigError(
                f"this {kind} has not started yet: it is asynchronous, so write 'cluster = await {kind}(...)', or "
                "'async with', before you use it"
            )

    def __repr__(self) -> str:
        if state := self._state:
            return f"{self._cluster_class_name}({self.name}, {first_line(state)})"
        workers = self.scheduler_info["workers"].values()
        gpus = sum(bool(w.get(KEY, {}).get("gpu")) for w in workers) // self.settings.workers_per_gpu
        text = str(super().__repr__()).replace(", workers=", ", connect by Client(cluster), workers=", 1)
        return f"{text.removesuffix(')')}, gpus={gpus})"

    def explain(self) -> Explanation:
        """Return the plan of the job, with where each part was set."""
        text, state = self._run.explain(), self._state
        if state and not self._stalled:
            return Explanation(f"{text}\nthis cluster is {state}\n")
        if facts := self._connection.scheduler_file:
            text += f"\nscheduler of job {self.job_id or '-'} on {facts.node}\n"
            text += f"dashboard: {'cluster.dashboard_link' if self.dashboard_link else 'none'}\n"
        return Explanation(text)

    @property
    def dashboard_link(self) -> str:
        """The dashboard's address for your browser; this process leads it to the scheduler's node. It holds a secret.

        Empty where the cluster has none (``dashboard=False``), or has ended.
        """
        browser = self._connection.browser
        return browser.url if browser and not self._end else ""

    def bindings(self) -> Any:  # a coroutine of an asynchronous cluster
        """Return what each worker is tied to, planned and actual: read back from the kernel, for all threads.

        Returns
        -------
        hpcgpu.report.workers.Bindings
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(worker_requests.read_bindings, self.scheduler_comm)

    def memory(self) -> Any:
        """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

        Returns
        -------
        hpcgpu.report.workers.Memory
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(worker_requests.read_memory, self.scheduler_comm)

    def trim_memory(self) -> Any:
        """Have all workers give free memory back to the kernel; see :func:`hpcgpu.trim_memory`.

        Returns
        -------
        dict of str to int
            Bytes given back, by worker; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(self._trim)

    async def _trim(self) -> Any:
        with self._progress.waiting("the workers give free memory back"):
            return await worker_requests.trim(self.scheduler_comm)

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
        return self.sync(self._summary) if asks else self._newest_summary()

    @property
    def _scheduler_answers(self) -> bool:
        return bool(self.status == Status.running and self.scheduler_comm is not None)

    async def _summary(self) -> Summary:
        if self._scheduler_answers:
            await self._ask_summary()
        return self._newest_summary()

    def _newest_summary(self) -> Summary:
        if isinstance(self._used, str):
            raise JobError(f"this {type(self).__name__} has no summary: {self._used}")
        return self._used

    async def _ask_summary(self) -> None:
        """Ask the scheduler, if it was reached; an error is kept as the reason and ends nothing else."""
        if self.scheduler_comm is None:
            return
        try:
            async with asyncio.timeout(_SUMMARY_S):
                self._used = Summary(**await self.scheduler_comm.hpcgpu_summary())
        except Exception as e:  # of a connection that is gone, or of a scheduler that closes
            if not isinstance(self._used, Summary):
                self._used = f"its scheduler does not answer: {reason_of(e)}"

    def _is_due(self) -> bool:
        """Return whether the workers' facts are old."""
        count = len(self.scheduler_info["workers"])
        return time.monotonic() - self._asked_s >= max(_SHORTEST_S, _PER_WORKER_S * count)

    async def _ask_workers(self) -> None:
        """Ask all workers; those that do not answer are shown by their names."""
        self._asked_s = time.monotonic()
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = await worker_requests.ask(self.scheduler_comm)
                await self._absent()
        except (OSError, TimeoutError):
            return
        self._facts = {a: facts for a, facts in answers.items() if isinstance(facts, WorkerFacts)}

    async def _ask_when_due(self) -> None:
        await asyncio.sleep(_SHORTEST_S)
        if self._is_due():
            await self._ask_workers()

    def _keep_asking(self) -> None:
        """Ask the workers again and again, on the event loop: a widget shows the page."""
        if self._asking is None:
            self._asking = supervise.Loop(self._ask_when_due, "the questions to the workers for a notebook")

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        may_wait = self.status == Status.running and not self.asynchronous and not self.called_from_running_loop
        if self.scheduler_info["workers"] and may_wait and self._is_due():
            self.sync(self._ask_workers)
        hint = self._connection.browser.hint if (link := str(self.dashboard_link)) and self._connection.browser else ""
        if link:  # a line has shown it before
            drop = self._progress.drop
            drop = supervise.log_errors(drop, "removing the line with the dashboard's link", supervise.only_log)
            self.loop.add_callback(drop, f"dashboard: {link}{hint}")
        workers = [  # of those that have not answered, the scheduler's facts
            self._facts.get(address) or read_facts(str(facts["name"]), {"node": facts["host"]}, facts.get(KEY, {}))
            for address, facts in self.scheduler_info["workers"].items()
        ]
        page = cluster_page(
            type(self).__name__,
            self.name,
            first_line(self._state or self.status.name),
            link,
            self._run.jobs.table,
            sorted(workers, key=lambda worker: by_number(worker.name)),
            0 if self._end else self._run.wanted_workers,
            hint,
            absence(self._away),
        )
        return page + (cluster_status or "")

    def _widget(self) -> Any:  # of ipywidgets, or None
        if self.status == Status.running:
            self.loop.add_callback(self._keep_asking)
        self._tab = super()._widget()
        if self._tab is not None and not self._run.scales:
            self._tab.children = self._tab.children[:1]  # without the tab for scale and adapt, which are refused
        return self._tab

    async def _check_absent(self, n_workers: int) -> None:
        """Raise JobError, with the reasons, if so many workers cannot come since others did not start or are lost."""
        absent, count = await self._absent(), self._run.wanted_workers
        if absent and not self._run.scales and n_workers > count - len(absent):
            raise JobError(f"no more than {count - len(absent)} of {count} workers can be there. {absence(absent)}")

    async def _absent(self) -> Sequence[tuple[str, str]]:
        with contextlib.suppress(OSError):  # the connection has just broken, which is reported elsewhere
            self._away = await self.scheduler_comm.hpcgpu_absent()
        return self._away

    def _line(self, target: int) -> str:
        """Return one line for the whole cluster."""
        workers = self.scheduler_info["workers"].values()
        jobs = [job for job in self._run.jobs.rows if job.has != "scheduler"]
        # an address is no node: jobs of one node may use several networks, and nodes behind one gateway share one
        nodes = {facts.get(KEY, {}).get("node", facts["host"]) for facts in workers}
        return summary_line(jobs, len(workers), target, len(nodes))

    def _show_end(self) -> None:
        """Update a widget that shows the page: distributed no longer does when the cluster has ended."""
        if self._tab is not None:
            self._tab.children[0].value = self._repr_html_()
