"""The scheduler's dashboard: guarded by its secret, loaded at the first request, reached from users' browsers."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Scheduler
from tornado.web import RequestHandler

from hpcgpu.deploy import compat
from hpcgpu.deploy.dashboard.usage_plugin import UsagePlugin
from hpcgpu.deploy.network.dashboard import HANDLER, NO_SECRET, carry
from hpcgpu.report import prometheus

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
    compat.guard_http(scheduler, secret, lambda: _load(scheduler), _NoSecret if secret else _NoDashboard)

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
        scheduler.http_application.add_handlers(".*", [("/status", _NoBokeh)])
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
        self.set_header("Content-Type", prometheus.CONTENT_TYPE)
        self.write(prometheus.render(self._usage.gpus()))


class _PlainText(RequestHandler):
    """A page of plain text, for each method of HTTP."""

    status, text = 404, ""

    def prepare(self) -> None:
        """Send the page."""
        self.set_status(self.status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(self.text)


class _NoBokeh(_PlainText):
    status, text = 501, _NO_BOKEH


class _NoSecret(_PlainText):
    text = NO_SECRET


class _NoDashboard(_PlainText):
    text = _NO_DASHBOARD
