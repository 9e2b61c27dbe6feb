"""The scheduler's dashboard: guarded by its secret, loaded at the first request, reached from users' browsers.

Without it, one line shows how many of a script's tasks are done: in place on a terminal, else as rare lines.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.web import RequestHandler

from hpcgpu.deploy import compat
from hpcgpu.deploy.dashboard import UsagePlugin
from hpcgpu.deploy.network.dashboard import HANDLER, NO_SECRET, carry
from hpcgpu.deploy.progress import Surface, surface
from hpcgpu.report.summary import CONTENT_TYPE, render
from hpcgpu.supervise import tasks

_NO_BOKEH = (
    "Dask's dashboard needs bokeh, which the scheduler's Python does not have: pip install 'hpcgpu[dashboard]'\n"
    "Without it there are tables alone: info/main/workers.html\n"
)
# Below the dashboard's secret.
METRICS = "hpcgpu/metrics"
_PAGE = "gpus"
_NO_DASHBOARD = "This cluster has no dashboard: it was started with dashboard=False.\n"


def serve(scheduler: Scheduler, secret: str) -> None:
    """Guard the dashboard, and let holders of the cluster's certificate reach it by Dask's own port.

    ``scheduler`` has not started yet; ``secret`` is the first part of every URL, empty: no dashboard.
    """
    compat.guard_http(scheduler, secret, lambda: _load(scheduler), _PlainText, NO_SECRET if secret else _NO_DASHBOARD)

    async def forward(comm: Any) -> None:  # distributed has no types
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", scheduler.http_server.port)
        except OSError:
            comm.abort()
            return
        await carry(comm, reader, writer)

    if secret:
        scheduler.handlers[HANDLER] = forward


def _load(scheduler: Scheduler) -> None:
    """Add the pages and Prometheus' metrics, at the first request: bokeh's import takes 0.3 CPU s."""
    metrics = (f"/{METRICS}", MetricsHandler, {"usage": scheduler.plugins[UsagePlugin.name]})
    scheduler.http_application.add_handlers(".*", [metrics])
    try:
        import distributed.dashboard.scheduler as dashboard
    except ImportError:
        scheduler.http_application.add_handlers(".*", [("/status", _PlainText, {"text": _NO_BOKEH, "status": 501})])
        return
    add_page(scheduler, dashboard)
    dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix="")


def add_page(scheduler: Scheduler, dashboard: Any) -> None:
    """Add the page to those of distributed's module ``dashboard.scheduler``, before it makes its application."""
    from distributed.dashboard.components.scheduler import env

    from hpcgpu.deploy.dashboard.page import gpus_doc

    title = env.filters["title"]
    # the menu writes names of pages by it: "Gpus"; distributed itself does so for its menu of plots
    env.filters["title"] = lambda name: title(name).replace("Gpu", "GPU")
    dashboard.applications[f"/{_PAGE}"] = gpus_doc
    pages = dashboard.template_variables(scheduler)["pages"]
    if _PAGE not in pages:
        pages.insert(pages.index("workers") + 1, _PAGE)


class MetricsHandler(RequestHandler):
    """Answers Prometheus."""

    def initialize(self, usage: UsagePlugin) -> None:
        """Keep the route's arguments; tornado calls this."""
        self._usage = usage

    def get(self) -> None:
        """Send the metrics."""
        self.set_header("Content-Type", CONTENT_TYPE)
        self.write(render(self._usage.gpus()))


class _PlainText(RequestHandler):
    """A page of plain text, for each method of HTTP."""

    def initialize(self, text: str, status: int = 404) -> None:
        """Keep the route's arguments; tornado calls this."""
        self._text, self._status = text, status

    def prepare(self) -> None:
        """Send the page."""
        self.set_status(self._status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(self._text)


_EVERY_S = 1.0
# A log gets a line for each tenth of the work, and one a minute.
_PARTS, _SELDOM_S = 10, 60.0
_LEFT = ("waiting", "queued", "no-worker", "processing")


class TaskProgress(SchedulerPlugin):
    """Reads the scheduler's counts once a second, and shows changes on ``shown_on``, by default standard error."""

    def __init__(self, scheduler: Scheduler, shown_on: Surface | None = None) -> None:
        self._scheduler, self._surface = scheduler, shown_on or surface()
        self._shown, self._part = "", -1
        self._shown_s = time.monotonic()
        self._timer = tasks.repeat(self.look, _EVERY_S, "the look at how many tasks are done")

    def look(self) -> None:
        """Show how many tasks are done, if that has changed."""
        line, done, left = _count(self._scheduler)
        part = done * _PARTS // (done + left) if done + left else -1
        is_due = part != self._part or time.monotonic() - self._shown_s >= _SELDOM_S
        if line not in ("", self._shown) and (self._surface.ticks or is_due):
            self._surface.show(line)
            self._shown, self._part, self._shown_s = line, part, time.monotonic()

    async def close(self) -> None:
        """Show the final counts; called by distributed when the scheduler closes."""
        self._timer.cancel()
        line = _count(self._scheduler)[0]
        if line != self._shown:
            self._surface.show(line)
        self._surface.end()


def _count(scheduler: Scheduler) -> tuple[str, int, int]:
    """Return the line, and how many tasks are done and left; a task that is computed again counts again."""
    prefixes = scheduler.task_prefixes.values()
    done = sum(prefix.state_counts["memory"] for prefix in prefixes)
    failed = sum(prefix.state_counts["erred"] for prefix in prefixes)
    now = {state: sum(prefix.states[state] for prefix in prefixes) for state in _LEFT}
    left = sum(now.values())
    if not done + left + failed:
        return "", 0, 0
    more = [f"{now['processing']} with workers"] if now["processing"] else []
    more += [f"{failed} failed"] if failed else []
    return ", ".join([f"tasks: {done} of {done + left + failed} done", *more]), done, left
