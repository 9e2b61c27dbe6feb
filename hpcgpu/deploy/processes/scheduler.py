"""The scheduler process: distributed's Scheduler, its dashboard, its clients' lease, and the leaders."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import dask
import tornado.platform.asyncio  # noqa: F401 - asyncio's loop as tornado takes it, which all of them run
from distributed import Scheduler
from distributed.core import CommClosedError
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.http.utils import get_handlers
from distributed.versions import get_versions
from tornado.web import RequestHandler

from hpcgpu import supervise
from hpcgpu.deploy import compat, network
from hpcgpu.deploy.dashboard import UsagePlugin, say_summary
from hpcgpu.deploy.dask_config import check_dask_memory
from hpcgpu.deploy.network.dashboard import HANDLER, NO_SECRET, carry
from hpcgpu.deploy.network.scheduler_file import Certificate, security
from hpcgpu.deploy.processes import Control
from hpcgpu.deploy.processes.stalls import StallDetector, limit_handshakes, subscribe, tell
from hpcgpu.errors import JobError, cause_of
from hpcgpu.host import log, peer_memory, process
from hpcgpu.report.summary import CONTENT_TYPE, render
from hpcgpu.supervise import reason_of

_LOOK_S = 0.1
# Interval of the checks, and how late one may come. If later, this process itself has been stopped (Slurm and PBS
# suspend jobs with SIGSTOP), and has read no sign of life. With a short grace a short stop counts, too.
_CHECK_S = 1.0
_LATE_S = 3.0
# After a stop the client has at least this long: it asks the batch system every 5 s whether the job goes on, and
# connects anew. Not longer: nothing of a dead client's run may be left after its grace and 10 s.
_FIND_S = 10.0
# Rank 0 ends the run, and answers at once. If it does not answer, it has been stopped.
_OBEY_S = 10.0
_CHECKING = "the check for the client's signs of life"


async def retire(scheduler: Scheduler, workers: Sequence[str]) -> list[str]:
    """Retire workers by address (``hpcgpu_retire``); return those that have left: the others keep their data."""
    # distributed's retire_workers checks only every 2 s whether the data has been moved (its active memory manager,
    # 2026.8.0). A batch system may leave a cancelled job 5 s.
    leaving = asyncio.create_task(scheduler.retire_workers(workers=list(workers), close_workers=True, remove=True))
    pushed = False
    while not (await asyncio.wait([leaving], timeout=_LOOK_S))[0]:
        amm = scheduler.extensions.get("amm")
        # only once: until the data has arrived, each run requests it again
        if not pushed and amm and amm.running:
            going = {scheduler.workers[address] for address in workers if address in scheduler.workers}
            if all(set(task.who_has or ()) - going for worker in going for task in worker.has_what):
                pushed = True
                amm.run_once()
    await leaving
    return [address for address in workers if address not in scheduler.workers]


class LeaseServer:
    """Tells rank 0, which ends the job, that the client outside has been silent for ``grace_s``, or has said goodbye.

    Not for silence alone: rank 0 first looks for a detachment file in the run's folder. A sign of life may be under way
    while another client detaches, and a client that detaches before there is a scheduler only writes the file.
    """

    def __init__(
        self,
        grace_s: float,
        control: Control,
        woken: Callable[[], None],  # called when this process was stopped and continues
        overdue: Callable[[], None],  # called when rank 0 was told to end the run and has not
    ) -> None:
        self._grace_s, self._control, self._woken, self._overdue = grace_s, control, woken, overdue
        self._heard = self._looked = time.monotonic()
        self._watched = self._detached = False
        # A plain timer, not a task: after a stop it must run before all else that is late, above all before the
        # scheduler's own look for silent workers (worker-ttl).
        self._timer = supervise.Ticker(self._look, _CHECK_S, _CHECKING)

    def renew(self, goodbye: bool = False, detach: bool = False) -> str:
        """Handle a sign of life (``hpcgpu_lease``), with which the client ends the job, or may be silent for long."""
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
    "Dask's dashboard needs bokeh, which the scheduler's Python does not have: pip install bokeh\n"
    "Without it there are tables alone: info/main/workers.html\n"
)
# Below the dashboard's secret.
METRICS = "hpcgpu/metrics"
_PAGE = "gpus"
_ROUTES = "distributed.scheduler.http.routes"  # modules; a user's own are imported at the start, which tells errors
_NO_DASHBOARD = "This cluster has no dashboard: it was started with dashboard=False.\n"


def serve(scheduler: Scheduler, secret: str) -> None:
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
    """Add pages and metrics, at the first request: bokeh and jupyter-server-proxy take 0.3 CPU s each to import."""
    modules = [module for module in dask.config.get(_ROUTES) if module.startswith("distributed.")]
    scheduler.http_application.add_handlers(".*", get_handlers(scheduler, modules))
    usage = scheduler.plugins[UsagePlugin.name]
    metrics = {"text": lambda: render(usage.gpus()), "status": 200, "content_type": CONTENT_TYPE}
    scheduler.http_application.add_handlers(".*", [(f"/{METRICS}", _PlainText, metrics)])
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


class _PlainText(RequestHandler):
    """A page of plain text, for each method of HTTP; ``text`` may be a function that returns it."""

    def initialize(
        self, text: str | Callable[[], str], status: int = 404, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        """Keep the route's arguments; tornado calls this."""
        self._text, self._status, self._content_type = text, status, content_type

    def prepare(self) -> None:
        """Send the page."""
        self.set_status(self._status)
        self.set_header("Content-Type", self._content_type)
        self.finish(self._text if isinstance(self._text, str) else self._text())


# Shorter than rank 0 waits: the log shows where the process hangs.
_HANGS_S = 55.0
# A client's gather() must see the errors before it sees that the connection is lost.
_TELL_S = 0.3
_DISMISS_S = 4.0
# A worker sends a heartbeat each 0.5 s, one of a thousand each 6 s (distributed 2026.8.0).
_SILENT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """The scheduler process's parameters."""

    local_directory: str  # private; distributed makes a folder in it, and puts that first into sys.path
    host: str  # to listen on; empty: all addresses, for ranks of other nodes or a client outside
    port: int = 0  # 0: a free one
    protocol: str
    node_copies: bool
    certificate: Certificate | None = None
    dashboard_secret: str = field(default="", repr=False)  # first part of every URL; empty: no dashboard
    client_grace_s: float = 30.0
    stalled_s: float = 60.0
    grows: bool = False  # more jobs with workers may come
    walltime_s: int | None = None  # requested
    summary: str = ""  # of the run's use at its end: lines, json (lines and JSON), or empty: none
    rank_pid: int  # of rank 0, which started it


def main(spec: SchedulerSpec, control: socket.socket) -> int:
    """Run until told to close; the entry of the forked process."""
    # A batch system that cancels a job signals all of its processes. Rank 0 ends the run, and says why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process.hide_gpus(spec.protocol)
    compat.spare_nvml()
    limit_handshakes()
    network.prepare(f"{spec.protocol}:", node_copies=spec.node_copies)
    peer_memory.allow(spec.rank_pid)  # the leader, from which the workers of its node descend
    # Of a node without a route to the Internet; ranks and clients get the addresses of its interfaces.
    warnings.filterwarnings("ignore", "Couldn't detect a suitable IP address", RuntimeWarning)
    faulthandler.dump_traceback_later(_HANGS_S, file=2)
    return asyncio.run(_serve(spec, control))


def silent_workers(scheduler: Scheduler) -> list[str]:
    """Return the addresses of workers without a heartbeat for long (``hpcgpu_silent``)."""
    # Their connections may be open: of a frozen node, a suspended job, a task that holds the GIL. distributed gives one
    # up after 5 minutes (worker-ttl, 2026.8.0). The batch system knows about their jobs earlier.
    return [address for address, worker in scheduler.workers.items() if time.time() - worker.last_seen > _SILENT_S]


async def _serve(spec: SchedulerSpec, sock: socket.socket) -> int:
    control = await Control.open(sock)
    try:
        scheduler = await _start(spec)
    except Exception as e:
        port = f"; scheduler_port={spec.port}: leave it out for a free port" if spec.port else ""
        control.send("error", text="".join(traceback.format_exception(e)), reason=reason_of(cause_of(e)) + port)
        await control.drained()
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    scheduler.add_plugin(WorkerCount(control), name="hpcgpu-report")
    leaders = LeaderConnections(control, grows=spec.grows)
    scheduler.handlers |= {"hpcgpu_watch": leaders.serve, "hpcgpu_notes": leaders.notes}
    scheduler.handlers["hpcgpu_failed"] = lambda text: control.send("failed", text=text)

    def woken() -> None:  # no worker counts as silent for the time in which this process did not hear it (worker-ttl)
        for worker in scheduler.workers.values():
            worker.last_seen = time.time()

    def overdue() -> None:  # the end of rank 0 is this process's end
        log.say(f"rank 0, process {spec.rank_pid}, does not end the run, as if it had been stopped; it is killed")
        os.kill(spec.rank_pid, signal.SIGKILL)

    lease = LeaseServer(spec.client_grace_s, control, woken, overdue)
    scheduler.handlers["hpcgpu_lease"] = lease.renew
    scheduler.handlers["hpcgpu_silent"] = lambda: silent_workers(scheduler)
    scheduler.handlers["hpcgpu_retire"] = lambda workers: retire(scheduler, workers)

    def stalled(what: str, reason: str) -> None:
        control.send("stalled", why=what, text=reason)
        tell(scheduler, reason)

    stalls = StallDetector(scheduler, spec.stalled_s, stalled, lambda: leaders.none_come)
    scheduler.handlers["subscribe_worker_status"] = lambda comm: subscribe(scheduler, comm, stalls.reason)
    ports = {"port": scheduler.port, "dashboard_port": scheduler.http_server.port}
    control.send("started", address=scheduler.address, hosts=compat.bound_hosts(scheduler) or [spec.host], **ports)
    async for message in control.messages():
        if message["op"] == "lease":  # from now on a client outside must send signs of life
            lease.watch(detached=message["detached"])
        elif message["op"] == "note":
            leaders.late.append((message["node"], message["text"]))
        elif message["op"] == "event":
            scheduler.log_event("hpcgpu", message["facts"])
        elif message["op"] == "summary":
            await say_summary(scheduler, spec.summary)
            control.send("summarised")
        elif message["op"] == "close":
            lease.close()
            stalls.close()
            if message["failed"]:
                compat.fail_futures(scheduler, JobError(f"the job ended: {message['reason']}"))
                await asyncio.sleep(_TELL_S)
            await leaders.dismiss()
            await scheduler.close(reason=message["reason"])
            return 0
    os._exit(1)  # rank 0 is gone


async def _start(spec: SchedulerSpec) -> Scheduler:
    place = {"host": spec.host, "port": spec.port, "protocol": spec.protocol, "local_directory": spec.local_directory}
    http = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}  # its pages come with the first request
    with dask.config.set({_ROUTES: [m for m in dask.config.get(_ROUTES) if not m.startswith("distributed.")]}):
        scheduler = Scheduler(security=security(spec.certificate), **place, **http)
    compat.share_versions(scheduler)
    UsagePlugin.attach(scheduler, spec.walltime_s)
    serve(scheduler, spec.dashboard_secret)
    return await scheduler


class WorkerCount(SchedulerPlugin):
    """Tells rank 0 the number of registered workers."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def add_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Report; called by distributed when a worker has registered."""
        self.control.send("workers", count=len(scheduler.workers))

    remove_worker = add_worker  # called by distributed when a worker is gone


class LeaderConnections:
    """Hold the leaders' connections, and tell rank 0 which are lost, and how many have workers."""

    def __init__(self, control: Control, *, grows: bool = False) -> None:
        self._control, self._grows = control, grows  # more leaders may come, whatever happens to these
        self._notes: dict[Any, tuple[str, Sequence[str]]] = {}  # node and notes, by connection
        self.late: list[tuple[str, str]] = []  # rank 0's note about workers that have not started
        self._working: set[Any] = set()  # connections of leaders with workers, running or being restarted
        self._died: list[str] = []
        self._had_workers = False
        self._left = asyncio.Event()
        self._dismissed = False

    @property
    def none_come(self) -> bool:
        """True if there were workers, and no more will come."""
        return self._had_workers and not self._grows and not self._working

    def notes(self) -> list[tuple[str, str]]:
        """Return the leaders' notes about their nodes: node and text (``hpcgpu_notes``)."""
        return [(node, text) for node, texts in self._notes.values() for text in texts] + self.late

    async def serve(
        self,
        comm: Any,  # distributed has no types
        node: str = "",
        notes: Sequence[str] = (),
        workers: int = 0,
    ) -> None:
        """Hold a leader's connection (``hpcgpu_watch``) until it ends."""
        self._notes[comm] = (node, notes)
        if workers:
            self._had_workers = True
            self._working.add(comm)
            self._tell()
        lost = True
        try:
            with contextlib.suppress(CommClosedError):
                await comm.write("watching")
                while (message := await comm.read()) != "bye":
                    self._working.discard(comm)  # all of its workers have ended for good
                    self._died += [message["died"]] if message["died"] else []
                    self._tell()
                lost = False
        finally:
            del self._notes[comm]
            self._left.set()
            if lost and not self._dismissed:
                self._control.send("leader_lost", node=node)
                self._died += [f"node {node} lost its leader"] if comm in self._working else []
            self._working.discard(comm)
            self._tell()

    def _tell(self) -> None:
        if self._had_workers and not self._grows and not self._dismissed:
            self._control.send("leaders", working=len(self._working), died="; ".join(self._died))

    async def dismiss(self) -> None:
        """Tell the leaders that the run ends, and wait until they have ended their workers."""
        self._dismissed = True  # before the scheduler closes: a nanny without one takes 1.6 s to close
        for comm in tuple(self._notes):
            with contextlib.suppress(CommClosedError):
                await comm.write("end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISMISS_S):
                while self._notes:
                    self._left.clear()
                    await self._left.wait()


def prepare_forks(*, simulated: bool) -> None:
    """Prepare a process for its forks, scheduler, workers and nannies; raise ConfigError for Dask's memory limits."""
    # Without it each worker takes 30 CPU ms more at its start (distributed 2026.8.0): it reads the versions of nine
    # packages, runs uname -p, and imports the routes of an HTTP server.
    import hpcgpu.deploy.processes.nanny
    import hpcgpu.deploy.processes.scheduler
    import hpcgpu.deploy.processes.worker  # noqa: F401

    if simulated:
        import hpcgpu.sim  # noqa: F401
    for module in dask.config.get("distributed.worker.http.routes"):
        if module.startswith("distributed."):  # others are the user's: a worker imports them, and reports errors
            importlib.import_module(module)
    get_versions()
    limit_handshakes()
    check_dask_memory()
