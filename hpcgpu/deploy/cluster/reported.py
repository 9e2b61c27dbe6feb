"""A cluster object's reports: bindings, memory, a summary of what was used, and its page in a notebook."""

from __future__ import annotations

from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster

from hpcgpu import supervise
from hpcgpu.deploy import workers
from hpcgpu.deploy.cluster.parts import Parts, first_line
from hpcgpu.report.summary import Summary
from hpcgpu.report.workers import cluster_page


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
        return self.sync(workers.read_bindings, self.scheduler_comm)

    def memory(self) -> Any:
        """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

        Returns
        -------
        hpcgpu.report.workers.Memory
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self.parts.must_run()
        return self.sync(workers.read_memory, self.scheduler_comm)

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
            return await workers.trim(self.scheduler_comm)

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
        self._look_at_workers()
        parts = self.parts
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

    def _look_at_workers(self) -> None:
        """Ask the workers for the facts of the page, unless this thread must not wait for them."""
        count, answers = len(self.scheduler_info["workers"]), self.parts.answers
        may_wait = self.status == Status.running and not self.asynchronous and not self.called_from_running_loop
        if count and may_wait and answers.is_due(count):
            self.sync(answers.ask_workers, self.scheduler_comm)

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
