"""The scheduler's dashboard: guarded by its secret, loaded at the first request, reached from users' browsers."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Scheduler
from tornado.web import RequestHandler

from hpcgpu.deploy import compat
from hpcgpu.deploy.dashboard import pages
from hpcgpu.deploy.network.dashboard import HANDLER, NO_SECRET, carry

_NO_BOKEH = (
    "Dask's dashboard needs bokeh, which the scheduler's Python does not have: pip install 'hpcgpu[dashboard]'\n"
    "Without it there are tables alone: info/main/workers.html\n"
)
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
    pages.add_metrics(scheduler)
    try:
        import distributed.dashboard.scheduler as dashboard
    except ImportError:
        scheduler.http_application.add_handlers(".*", [("/status", _NoBokeh)])
        return
    pages.add_page(scheduler, dashboard)
    dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix="")


class _Said(RequestHandler):
    """Answers every request with a page of plain text, for each method of HTTP."""

    status, text = 404, ""

    def prepare(self) -> None:
        """Send the page."""
        self.set_status(self.status)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(self.text)


class _NoBokeh(_Said):
    status, text = 501, _NO_BOKEH


class _NoSecret(_Said):
    text = NO_SECRET


class _NoDashboard(_Said):
    text = _NO_DASHBOARD
