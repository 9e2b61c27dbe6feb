"""The scheduler process: distributed's Scheduler, its guarded dashboard, the client's lease, and the leaders."""

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import dask
import tornado.platform.asyncio  # noqa: F401 - asyncio's loop as tornado takes it, which all of them run
from distributed import Scheduler
from distributed.core import CommClosedError
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.versions import get_versions

from hpcgpu.deploy import compat
from hpcgpu.deploy.dashboard import UsagePlugin, say_summary
from hpcgpu.deploy.network import protocols
from hpcgpu.deploy.network.tls import Certificate, security
from hpcgpu.deploy.processes import Control, services
from hpcgpu.deploy.processes.services import LeaseServer, TaskProgress, retire
from hpcgpu.deploy.processes.stalls import StallDetector, limit_handshakes, subscribe, tell
from hpcgpu.deploy.settings import check_dask_memory
from hpcgpu.errors import JobError, cause_of
from hpcgpu.host import log, peer_memory, process
from hpcgpu.supervise import reason_of

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
    certificate: Certificate | None = None
    dashboard_secret: str = field(default="", repr=False)  # first part of every URL; empty: no dashboard
    client_grace_s: float = 30.0
    stalled_s: float = 60.0
    grows: bool = False  # more jobs with workers may come
    walltime_s: int | None = None  # requested
    summary: str = ""  # of the run's use at its end: lines, json (lines and JSON), or empty: none
    progress: bool = False  # report how many tasks are done
    rank_pid: int  # of rank 0, which started it


def main(spec: SchedulerSpec, control: socket.socket) -> int:
    """Run until told to close; the entry of the forked process."""
    # A batch system that cancels a job signals all of its processes. Rank 0 ends the run, and says why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process.hide_gpus(spec.protocol)
    compat.spare_nvml()
    limit_handshakes()
    protocols.prepare(f"{spec.protocol}:")
    peer_memory.allow(spec.rank_pid)  # the leader, from which the workers of its node descend
    faulthandler.dump_traceback_later(_HANGS_S, file=2)
    return asyncio.run(_serve(spec, control))


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
    lease = LeaseServer(
        spec.client_grace_s, control, lambda: compat.forgive_silence(scheduler), lambda: _kill_rank(spec.rank_pid)
    )
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
    scheduler = Scheduler(
        host=spec.host,
        port=spec.port,
        protocol=spec.protocol,
        security=security(spec.certificate),
        local_directory=spec.local_directory,
        dashboard=False,
        dashboard_address="127.0.0.1:0",
    )
    UsagePlugin.attach(scheduler, spec.walltime_s)
    services.serve(scheduler, spec.dashboard_secret)
    if spec.progress:
        scheduler.add_plugin(TaskProgress(scheduler), name="hpcgpu-progress")
    return await scheduler


def silent_workers(scheduler: Scheduler) -> list[str]:
    """Return the addresses of workers without a recent sign of life (``hpcgpu_silent``)."""
    # Their connections may be open: of a frozen node, a suspended job, a task that holds the GIL. distributed gives
    # such a worker up after 5 minutes (worker-ttl, 2026.8.0). The batch system knows about their jobs earlier.
    now = time.time()
    return [address for address, worker in scheduler.workers.items() if now - worker.last_seen > _SILENT_S]


def _kill_rank(pid: int) -> None:
    """Kill rank 0, and with it this process: it was told to end the run, and does not."""
    log.say(f"rank 0, process {pid}, does not end the run, as if it had been stopped; it is killed")
    os.kill(pid, signal.SIGKILL)


class WorkerCount(SchedulerPlugin):
    """Tells rank 0 the number of registered workers."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def add_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Report; called by distributed when a worker has registered."""
        self.control.send("workers", count=len(scheduler.workers))

    remove_worker = add_worker  # called by distributed when a worker is gone


class LeaderConnections:
    """Hold the leaders' connections: which leaders live, and which have workers.

    End of file, at either end, means that the peer is gone. ``control``: to rank 0, which hears of lost leaders, and of
    how many have workers. ``grows``: more leaders may come, whatever happens to these.
    """

    def __init__(self, control: Control, *, grows: bool = False) -> None:
        self._control, self._grows = control, grows
        self._comms: set[Any] = set()
        self._notes: dict[Any, tuple[str, Sequence[str]]] = {}
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
        return [(node, text) for node, texts in self._notes.values() for text in texts]

    async def serve(
        self,
        comm: Any,  # distributed has no types
        node: str = "",
        notes: Sequence[str] = (),
        workers: int = 0,
    ) -> None:
        """Hold a leader's connection (``hpcgpu_watch``) until it ends."""
        self._comms.add(comm)
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
            self._comms.discard(comm)
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
        """Tell the leaders that the run ends, and wait until they have ended their workers.

        A nanny whose scheduler is gone takes 1.6 s to close.
        """
        self._dismissed = True
        for comm in tuple(self._comms):
            with contextlib.suppress(CommClosedError):
                await comm.write("end")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISMISS_S):
                while self._comms:
                    self._left.clear()
                    await self._left.wait()


_ROUTES = "distributed.worker.http.routes"


def prepare_forks(*, simulated: bool) -> None:
    """Prepare a process for its forks, scheduler, workers and nannies; raise ConfigError for Dask's memory limits.

    Without it each worker takes 30 CPU ms more at its start (distributed 2026.8.0): it reads the versions of nine
    packages, runs ``uname -p``, and imports the routes of an HTTP server.
    """
    import hpcgpu.deploy.processes.nanny
    import hpcgpu.deploy.processes.scheduler
    import hpcgpu.deploy.processes.worker  # noqa: F401

    if simulated:
        import hpcgpu.sim.dask  # noqa: F401
    for module in dask.config.get(_ROUTES):
        if module.startswith("distributed."):  # others are the user's: a worker imports them, and reports errors
            importlib.import_module(module)
    get_versions()
    limit_handshakes()
    check_dask_memory()
