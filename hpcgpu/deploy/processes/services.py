"""Services of the scheduler: for clients, who hold its lease and retire workers, and for browsers, its dashboard.

The dashboard is guarded by its secret, loaded at the first request, reached from users' browsers. Without it, one line
shows how many of a script's tasks are done: in place on a terminal, else as rare lines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.web import RequestHandler

from hpcgpu import supervise
from hpcgpu.deploy import compat
from hpcgpu.deploy.dashboard import UsagePlugin
from hpcgpu.deploy.network.dashboard import HANDLER, NO_SECRET, carry
from hpcgpu.deploy.processes import Control
from hpcgpu.deploy.progress import Surface, surface
from hpcgpu.report.summary import CONTENT_TYPE, render

_LOOK_S = 0.1
# Interval of the checks, and how late one may come. When it comes later, this process itself has been
# stopped (Slurm and PBS suspend jobs with SIGSTOP), and has read no sign of life of client and workers. With a short
# grace a short stop counts: by the next check the client would be silent for too long.
_CHECK_S = 1.0
_LATE_S = 3.0
# After a stop the client has at least this long: it asks the batch system every 5 s whether the job goes on, and
# connects anew. Not longer: nothing of a dead client's run may be left after its grace and 10 s.
_FIND_S = 10.0
# Rank 0 ends the run, and answers at once. If it does not answer, it has been stopped.
_OBEY_S = 10.0
_CHECKING = "the check for the client's signs of life"


async def retire(scheduler: Scheduler, workers: Sequence[str]) -> list[str]:
    """Retire workers by address (``hpcgpu_retire``); return those that have left the cluster.

    They get no new tasks, sole replicas are moved elsewhere, then they close; the others hold data that no worker can
    take. distributed's ``retire_workers`` does the same, but checks only every 2 s whether the data has been moved (its
    active memory manager, 2026.8.0). A batch system may leave a cancelled job 5 s.
    """
    leaving = asyncio.create_task(scheduler.retire_workers(workers=list(workers), close_workers=True, remove=True))
    pushed = False
    while not (await asyncio.wait([leaving], timeout=_LOOK_S))[0]:
        amm = scheduler.extensions.get("amm")
        # only once: until the data has arrived, each run requests it again
        if not pushed and amm and amm.running and _is_copied(scheduler, workers):
            pushed = True
            amm.run_once()
    await leaving
    return [address for address in workers if address not in scheduler.workers]


def _is_copied(scheduler: Scheduler, workers: Sequence[str]) -> bool:
    going = {scheduler.workers[address] for address in workers if address in scheduler.workers}
    return all(set(ts.who_has or ()) - going for ws in going for ts in ws.has_what)


class LeaseServer:
    """Tells rank 0 that the client outside has been silent for ``grace_s``, or has said goodbye.

    Rank 0 ends the job, but not for silence alone: it first looks for a detachment file in the run's folder. A sign of
    life may be under way while another client detaches, and arrive later. A client that detaches before there is a
    scheduler only writes the file. ``woken`` is called when this process was stopped and continues; ``overdue`` when
    rank 0 was told to end the run and has not, after twice the grace or 10 s.
    """

    def __init__(
        self, grace_s: float, control: Control, woken: Callable[[], None], overdue: Callable[[], None]
    ) -> None:
        self._grace_s, self._control, self._woken, self._overdue = grace_s, control, woken, overdue
        self._heard = self._looked = time.monotonic()
        self._watched = self._detached = False
        # A plain timer, not a task: after a stop it must run before all else that is late, above all before the
        # scheduler's own look for silent workers (worker-ttl).
        self._timer = supervise.Ticker(self._look, _CHECK_S, _CHECKING)

    def renew(self, goodbye: bool = False, detach: bool = False) -> str:
        """Handle a client's sign of life (``hpcgpu_lease``); ``goodbye``: end the job.

        ``detach``: the client may be silent until its next sign of life.
        """
        # _look may have set a later time after a stop, and a sign from before the stop is read only now
        self._heard = max(self._heard, time.monotonic())
        self._detached = detach
        if goodbye:
            self._tell("end", "the client said goodbye")
        return "OK"

    def watch(self, *, detached: bool) -> None:
        """Check for silence from now on, or from the next sign of life if the client has detached."""
        self._heard = self._looked = time.monotonic()
        self._watched, self._detached = True, detached
        self._timer.cancel()
        self._timer = supervise.Ticker(self._look, _CHECK_S, _CHECKING)

    def close(self) -> None:
        """Stop checking."""
        self._timer.cancel()

    def _look(self) -> None:
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        if now - before > _CHECK_S + min(_LATE_S, self._grace_s / 4):
            self._heard = now + max(0.0, _FIND_S - self._grace_s)
            self._woken()
        if self._watched and not self._detached and now - self._heard >= self._grace_s:
            self._tell("silent", f"the client has not been heard from for {self._grace_s:g} s")

    def _tell(self, what: str, why: str) -> None:
        self._control.send(what, reason=why)
        self.close()
        limit_s = min(2 * self._grace_s, _OBEY_S)
        self._timer = supervise.Ticker(self._overdue, limit_s, "the end of a run whose rank 0 does not answer")


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
        self._timer = supervise.Ticker(self.look, _EVERY_S, "the look at how many tasks are done")

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
