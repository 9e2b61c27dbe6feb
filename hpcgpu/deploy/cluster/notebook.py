"""A cluster object in a notebook: what its workers say of themselves, asked as long as somebody looks."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.protocol.pickle import dumps, loads

from hpcgpu.deploy import report
from hpcgpu.deploy.cluster.progress import Progress
from hpcgpu.deploy.jobs.rows import JobRow
from hpcgpu.plan.jobs.worker_names import by_number
from hpcgpu.plan.views.notebook import ClusterView, WorkerView, cluster_page
from hpcgpu.supervise import tasks

_ANSWER_S = 3.0
# A question to one worker costs the scheduler 0.8 CPU ms (8 workers on 2 cores, distributed 2026.8.0): a hundredth.
_SHORTEST_S, _PER_WORKER_S = 2.0, 0.08


class NotebookCluster(Cluster):
    """distributed's cluster object, as a notebook shows it."""

    _progress: Progress

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        self._page = Page()
        self._tab: Any = None  # the widget, once it has been shown
        super().__init__(**options)

    @abstractmethod
    def _view(self) -> ClusterView:
        """Return what the object knows of itself."""

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        self._look_at_workers()
        view = replace(
            self._view(),
            kind=type(self).__name__,
            name=self.name,
            jobs=tuple((row.view.id, row.view.text, row.has, row.log) for row in self._job_rows()),
        )
        if view.link:  # a line has said it before
            drop = tasks.guarded(self._progress.drop, "taking back the line with the dashboard's link", tasks.say_only)
            self.loop.add_callback(drop, f"dashboard: {view.link}")
        return self._page.html(view, self.scheduler_info["workers"]) + (cluster_status or "")

    def _job_rows(self) -> Sequence[JobRow]:
        """Return the jobs, as tables show them."""
        return ()

    def _look_at_workers(self) -> None:
        """Ask the workers for what a notebook shows, unless this thread may not wait for them: then they are asked."""
        count = len(self.scheduler_info["workers"])
        may_wait = self.status == Status.running and not self.asynchronous and not self.called_from_running_loop
        if count and may_wait and self._page.is_due(count):
            self.sync(self._page.ask, self.scheduler_comm)

    def _widget(self) -> Any:  # noqa: ANN401 - of ipywidgets, or None
        if self.status == Status.running:
            self.loop.add_callback(
                self._page.keep, lambda: self.scheduler_comm, lambda: len(self.scheduler_info["workers"])
            )
        self._tab = super()._widget()
        return self._tab

    def _show_end(self) -> None:
        """Show in the widget that the cluster has ended: distributed's looks at it no more."""
        if self._tab is not None:
            self._tab.children[0].value = self._repr_html_()


class Page:
    """The HTML of a cluster object, and the facts that it shows.

    The event loop's thread asks; any thread may read.
    """

    def __init__(self) -> None:
        self._views: dict[str, WorkerView] = {}  # by address
        self._asked_s = 0.0
        self._asking: tasks.Loop | None = None

    def html(self, view: ClusterView, workers: Mapping[str, Any]) -> str:
        """Return it.

        Parameters
        ----------
        view : ClusterView
            All but the workers.
        workers : mapping
            What the scheduler says of its workers, by address.

        """
        shown = [
            self._views.get(address) or WorkerView(str(facts["name"]), str(facts["host"]))
            for address, facts in workers.items()
        ]
        shown.sort(key=lambda w: by_number(w.name))
        return cluster_page(replace(view, workers=tuple(shown)))

    def is_due(self, workers: int) -> bool:
        """Tell whether the facts are old."""
        return time.monotonic() - self._asked_s >= max(_SHORTEST_S, _PER_WORKER_S * workers)

    async def ask(self, scheduler: Any) -> None:  # noqa: ANN401 - distributed's rpc
        """Ask all workers; those that do not answer are shown by their names."""
        self._asked_s = time.monotonic()
        message = {"op": "run", "function": dumps(report.worker_view), "args": dumps(()), "kwargs": dumps({})}
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = await scheduler.broadcast(msg=message, on_error="return_pickle")
        except (OSError, TimeoutError):
            return
        self._views = {a: view for a, answer in answers.items() if (view := _read(answer)) is not None}

    def keep(self, scheduler: Callable[[], Any], workers: Callable[[], int]) -> None:
        """Ask again and again, on the event loop: a widget shows it.

        Parameters
        ----------
        scheduler, workers : callable
            Return the connection to the scheduler, and the number of workers.

        """
        if self._asking is None:

            async def ask() -> None:
                await asyncio.sleep(_SHORTEST_S)
                if self.is_due(workers()):
                    await self.ask(scheduler())

            self._asking = tasks.keep(ask, "the look at the workers for a notebook")

    def close(self) -> None:
        """Ask no more."""
        if self._asking:
            self._asking.cancel()
        self._views = {}


def _read(answer: Any) -> WorkerView | None:  # noqa: ANN401
    if isinstance(answer, bytes):
        answer = loads(answer)
    found = answer.get("result") if isinstance(answer, dict) and answer.get("status") == "OK" else None
    return found if isinstance(found, WorkerView) else None
