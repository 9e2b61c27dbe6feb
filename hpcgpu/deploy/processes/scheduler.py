"""The scheduler process: distributed's Scheduler, its guarded dashboard, the client's lease."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import traceback
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerStatusPlugin

from hpcgpu.deploy import compat
from hpcgpu.deploy.network import protocols
from hpcgpu.deploy.network.trust import Certificate, security
from hpcgpu.deploy.processes import handshakes
from hpcgpu.deploy.processes.control import Control
from hpcgpu.deploy.processes.helm import Helm
from hpcgpu.deploy.processes.leaders import Watchers
from hpcgpu.deploy.processes.retire import retire
from hpcgpu.deploy.processes.silence import silent
from hpcgpu.deploy.processes.stalls import Stalls
from hpcgpu.deploy.processes.watch import Lease
from hpcgpu.errors import JobError, cause_of
from hpcgpu.host import log, process

# Before rank 0 gives up waiting (agent.rank0): the log shows where it hangs.
_HANGS_S = 55.0
# A client's gather() must have looked at the errors before it hears that the connection is lost.
_TELL_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """What the scheduler process starts with.

    Attributes
    ----------
    local_directory : str
        A private folder: distributed puts one of its own into it, and that first into ``sys.path``.
    host : str
        Where it listens; empty when ranks of other nodes or a client outside must reach it: on all addresses.
    rank_pid : int
        The process that started it, rank 0.
    dashboard_secret : str
        First part of every URL of the dashboard; empty: no dashboard.
    grows : bool
        More jobs with workers may come.

    """

    local_directory: str
    host: str
    protocol: str
    certificate: Certificate | None = None
    dashboard_secret: str = field(default="", repr=False)
    client_grace_s: float = 30.0
    stalled_s: float = 60.0
    grows: bool = False
    rank_pid: int


def main(spec: SchedulerSpec, control: socket.socket) -> int:
    """Run until told to close; the entry of the forked process."""
    # A batch system that cancels a job signals every process of it: rank 0 is to end the run, and say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process.hide_gpus(spec.protocol)
    handshakes.limit()
    protocols.prepare(f"{spec.protocol}:")
    faulthandler.dump_traceback_later(_HANGS_S, file=2)
    return asyncio.run(_serve(spec, control))


async def _serve(spec: SchedulerSpec, sock: socket.socket) -> int:
    control = await Control.open(sock)
    try:
        scheduler = await _start(spec)
    except Exception as e:
        reason = "".join(traceback.format_exception_only(cause_of(e))).strip()
        control.send("error", text="".join(traceback.format_exception(e)), reason=reason)
        await control.drained()
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    scheduler.add_plugin(Report(scheduler, control), name="hpcgpu-report")
    watchers = Watchers(control, grows=spec.grows)
    scheduler.handlers["hpcgpu_watch"] = watchers.serve
    scheduler.handlers["hpcgpu_notes"] = watchers.notes
    scheduler.handlers["hpcgpu_failed"] = lambda text: control.send("failed", text=text)
    lease = Lease(
        spec.client_grace_s, control, lambda: compat.forgive_silence(scheduler), lambda: _kill_rank(spec.rank_pid)
    )
    scheduler.handlers["hpcgpu_lease"] = lease.renew
    helm = Helm()
    scheduler.handlers["hpcgpu_helm"] = helm.serve
    scheduler.handlers["hpcgpu_scale"] = helm.scale
    scheduler.handlers["hpcgpu_silent"] = lambda: silent(scheduler)
    scheduler.handlers["hpcgpu_retire"] = lambda workers: retire(scheduler, workers)

    def stalled(what: str, reason: str) -> None:
        control.send("stalled", why=what, text=reason)
        tell(scheduler, reason)

    stalls = Stalls(scheduler, spec.stalled_s, stalled, lambda: watchers.none_come)
    scheduler.handlers["subscribe_worker_status"] = lambda comm: subscribe(scheduler, comm, stalls.reason)
    ports = {"port": scheduler.port, "dashboard_port": scheduler.http_server.port}
    control.send("started", address=scheduler.address, hosts=compat.bound_hosts(scheduler) or [spec.host], **ports)
    async for message in control.messages():
        if message["op"] == "lease":  # from now on a client outside must be heard from
            lease.watch(detached=message["detached"])
        elif message["op"] == "event":
            scheduler.log_event("hpcgpu", message["facts"])
        elif message["op"] == "close":
            lease.close()
            stalls.close()
            if message["failed"]:
                compat.fail_futures(scheduler, JobError(f"the job ended: {message['reason']}"))
                await asyncio.sleep(_TELL_S)
            await watchers.dismiss()
            await scheduler.close(reason=message["reason"])
            return 0
    os._exit(1)  # the rank is gone: nobody is left to close for


async def _start(spec: SchedulerSpec) -> Scheduler:
    scheduler = Scheduler(
        host=spec.host,
        port=0,
        protocol=spec.protocol,
        security=security(spec.certificate),
        local_directory=spec.local_directory,
        dashboard=False,
        dashboard_address="127.0.0.1:0",
        http_prefix=f"/{spec.dashboard_secret or 'off'}",
    )
    compat.guard_http(scheduler, spec.dashboard_secret)
    return await scheduler


def _kill_rank(pid: int) -> None:
    """End rank 0, and with it this process: it has been told to end the run, and does not."""
    log.say(f"rank 0, process {pid}, does not end the run, as if it had been stopped; it is killed")
    os.kill(pid, signal.SIGKILL)


class Sight(WorkerStatusPlugin):
    """Tells one cluster object which workers are there.

    distributed's have one name, so that the second object takes the first one's place (2026.8.0).
    """

    def __init__(self, scheduler: Scheduler, comm: Any) -> None:  # noqa: ANN401 - distributed has no types
        self.name = f"{WorkerStatusPlugin.name}-{id(comm)}"
        super().__init__(scheduler, comm)


def subscribe(scheduler: Scheduler, comm: Any, stalled: str) -> dict[str, Any]:  # noqa: ANN401
    """Handle a cluster object's ``subscribe_worker_status`` as distributed's scheduler does, for any number of them.

    ``stalled``: why nothing goes on at present.
    """
    Sight(scheduler, comm)
    facts: dict[str, Any] = {**scheduler.identity(), "stalled": stalled}
    for worker in facts["workers"].values():
        del worker["metrics"], worker["last_seen"]
    return facts


def tell(scheduler: Scheduler, stalled: str) -> None:
    """Tell all cluster objects why nothing goes on; empty: something does."""
    for plugin in scheduler.plugins.values():
        if isinstance(plugin, Sight):
            plugin.bcomm.send(["stalled", stalled])


class Report(SchedulerPlugin):
    """Tells rank 0 which workers are there."""

    def __init__(self, scheduler: Scheduler, control: Control) -> None:
        self.scheduler, self.control = scheduler, control

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Called by distributed when a worker has registered."""
        self._tell()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Called by distributed when a worker is gone."""
        self._tell()

    def _tell(self) -> None:
        self.control.send("workers", count=len(self.scheduler.workers))
