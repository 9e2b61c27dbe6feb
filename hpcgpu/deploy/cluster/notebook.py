"""A cluster object in a notebook."""

from __future__ import annotations

from typing import Any

from distributed.core import Status

from hpcgpu.deploy.cluster.parts import first_line
from hpcgpu.deploy.cluster.reported import ReportedCluster
from hpcgpu.report.cluster import cluster_page
from hpcgpu.supervise import tasks


class NotebookCluster(ReportedCluster):
    """distributed's cluster object, with its page in a notebook."""

    _tab: Any = None  # the widget, once it has been shown

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        self._look_at_workers()
        parts = self.parts
        link = parts.connection.browser.url if parts.connection.browser and not parts.end else ""
        if link:  # a line has shown it before
            drop = self.parts.progress.drop
            drop = tasks.log_errors(drop, "removing the line with the dashboard's link", tasks.only_log)
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
            self.parts.answers.shown(lambda: setattr(self._tab.children[0], "value", self._repr_html_()))
        return self._tab
