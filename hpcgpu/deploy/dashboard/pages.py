"""Add the page "GPUs" and Prometheus' metrics to Dask's dashboard at its first use: bokeh's import takes 0.3 CPU s."""

from __future__ import annotations

from typing import Any

from distributed import Scheduler
from tornado.web import RequestHandler

from hpcgpu.deploy.dashboard.ledger import Ledger
from hpcgpu.plan.views import prometheus

# Below the dashboard's secret.
METRICS = "hpcgpu/metrics"
_PAGE = "gpus"


class MetricsHandler(RequestHandler):
    """Answers Prometheus."""

    def initialize(self, ledger: Ledger) -> None:
        """Keep the route's arguments; tornado calls this."""
        self._ledger = ledger

    def get(self) -> None:
        """Send the metrics."""
        self.set_header("Content-Type", prometheus.CONTENT_TYPE)
        self.write(prometheus.render(self._ledger.gpus()))


def add_metrics(scheduler: Scheduler) -> None:
    """Serve the metrics."""
    ledger = scheduler.plugins[Ledger.name]
    route = (f"/{METRICS}", MetricsHandler, {"ledger": ledger})
    scheduler.http_application.add_handlers(".*", [route])


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
