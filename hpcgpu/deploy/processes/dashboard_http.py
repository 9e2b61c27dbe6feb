"""The scheduler's HTTP: the guard of the dashboard, its pages and its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import dask
from distributed import Scheduler
from distributed.http.utils import get_handlers
from tornado.web import RequestHandler, stream_request_body

from hpcgpu.deploy import compat
from hpcgpu.deploy.dashboard.usage import UsagePlugin
from hpcgpu.deploy.network.dashboard import HANDLER, NO_SECRET, carry
from hpcgpu.report.metrics import CONTENT_TYPE, render

_NO_BOKEH = (
    "Dask's dashboard needs bokeh, which the scheduler's Python does not have: pip install bokeh\n"
    "Without it there are tables alone: info/main/workers.html\n"
)
_METRICS = "hpcgpu/metrics"  # below the dashboard's secret
_PAGE = "gpus"
ROUTES = "distributed.scheduler.http.routes"  # modules; a user's own are imported at the start, which tells errors
# Leads to pages of workers, which have none here; who has the secret alone would reach websockets of this node by it.
_WORKERS_PAGES = "distributed.http.proxy"
_NO_DASHBOARD = "This cluster has no dashboard: it was started with dashboard=False.\n"


def serve_dashboard(scheduler: Scheduler, secret: str) -> None:
    """Guard the dashboard, and let holders of the cluster's certificate reach it by Dask's own port; "": none."""
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
    """Add pages and metrics, at the first request: bokeh takes 0.3 CPU s to import."""
    routes = [module for module in dask.config.get(ROUTES) if module.startswith("distributed.")]
    modules = [module for module in routes if module != _WORKERS_PAGES]
    scheduler.http_application.add_handlers(".*", get_handlers(scheduler, modules))
    usage = scheduler.plugins[UsagePlugin.name]

    async def rendered() -> str:
        gpus, rows = await usage.rows()
        return render(rows, usage.energy(), is_folded=rows is not gpus)

    metrics = {"text": rendered, "status": 200, "content_type": CONTENT_TYPE}
    scheduler.http_application.add_handlers(".*", [(f"/{_METRICS}", _PlainText, metrics)])
    try:
        import distributed.dashboard.scheduler as dashboard
    except ImportError:
        needs_bokeh = (f"/(?:status|{_PAGE})", _PlainText, {"text": _NO_BOKEH, "status": 501})
        scheduler.http_application.add_handlers(".*", [needs_bokeh])
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


@stream_request_body  # tornado collects the body of any other request, up to 100 MB, before the handler is asked
class _PlainText(RequestHandler):
    """A page of plain text, for each method of HTTP; ``text`` may be a coroutine function that returns it."""

    def initialize(
        self,
        text: str | Callable[[], Awaitable[str]],
        status: int = 404,
        content_type: str = "text/plain; charset=utf-8",
    ) -> None:
        """Keep the route's arguments; tornado calls this."""
        self._text, self._status, self._content_type = text, status, content_type

    async def prepare(self) -> None:
        """Send the page."""
        self.set_status(self._status)
        self.set_header("Content-Type", self._content_type)
        self.finish(self._text if isinstance(self._text, str) else await self._text())
