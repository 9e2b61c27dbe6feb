"""The scheduler process: distributed's Scheduler, its guarded dashboard, the client's lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.core import CommClosedError
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerStatusPlugin

from hpcgpu.deploy import compat
from hpcgpu.deploy.network.trust import Certificate, security
from hpcgpu.deploy.processes.control import Control
from hpcgpu.deploy.processes.helm import Helm
from hpcgpu.deploy.processes.retire import retire
from hpcgpu.deploy.processes.silence import silent
from hpcgpu.deploy.processes.watch import Lease
from hpcgpu.errors import JobError
from hpcgpu.host import process

_DISMISS_S = 4.0
# A client's gather() must have looked at the errors before it hears that the connection is lost.
_TELL_S = 0.3
# Another rank of a dead leader's node has this long to lead in its place.
_SUCCESSOR_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """What the scheduler process starts with.

    Attributes
    ----------
    host : str
        Where it listens; empty when ranks of other nodes or a client outside must reach it: on all addresses.
    dashboard_secret : str
        First part of every URL of the dashboard; empty: no dashboard.

    """

    host: str
    protocol: str
    certificate: Certificate | None = None
    dashboard_secret: str = field(default="", repr=False)
    client_grace_s: float = 30.0


def main(spec: SchedulerSpec, control: socket.socket) -> int:
    """Run until told to close; the entry of the forked process."""
    # A batch system that cancels a job signals every process of it: rank 0 is to end the run, and say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process.hide_gpus(spec.protocol)
    asyncio.run(_serve(spec, control))
    return 0


async def _serve(spec: SchedulerSpec, sock: socket.socket) -> None:
    control = await Control.open(sock)
    scheduler = Scheduler(
        host=spec.host,
        port=0,
        protocol=spec.protocol,
        security=security(spec.certificate),
        dashboard=False,
        dashboard_address="127.0.0.1:0",
        http_prefix=f"/{spec.dashboard_secret or 'off'}",
    )
    compat.guard_http(scheduler, spec.dashboard_secret)
    await scheduler
    scheduler.add_plugin(Report(scheduler, control), name="hpcgpu-report")
    watchers = Watchers(control)
    scheduler.handlers["hpcgpu_watch"] = watchers.serve
    scheduler.handlers["hpcgpu_notes"] = watchers.notes
    scheduler.handlers["hpcgpu_failed"] = lambda text: control.send("failed", text=text)
    lease = Lease(spec.client_grace_s, control, lambda: compat.forgive_silence(scheduler))
    scheduler.handlers["hpcgpu_lease"] = lease.renew
    helm = Helm()
    scheduler.handlers["hpcgpu_helm"] = helm.serve
    scheduler.handlers["hpcgpu_scale"] = helm.scale
    scheduler.handlers["subscribe_worker_status"] = lambda comm: subscribe(scheduler, comm)
    scheduler.handlers["hpcgpu_silent"] = lambda: silent(scheduler)
    scheduler.handlers["hpcgpu_retire"] = lambda workers: retire(scheduler, workers)
    ports = {"port": scheduler.port, "dashboard_port": scheduler.http_server.port}
    control.send("started", address=scheduler.address, hosts=compat.bound_hosts(scheduler) or [spec.host], **ports)
    async for message in control.messages():
        if message["op"] == "lease":  # from now on a client outside must be heard from
            lease.watch(detached=message["detached"])
        elif message["op"] == "event":
            scheduler.log_event("hpcgpu", message["facts"])
        elif message["op"] == "close":
            lease.close()
            if message["failed"]:
                compat.fail_futures(scheduler, JobError(f"the job ended: {message['reason']}"))
                await asyncio.sleep(_TELL_S)
            await watchers.dismiss()
            await scheduler.close(reason=message["reason"])
            return
    os._exit(1)  # the rank is gone: nobody is left to close for


class Sight(WorkerStatusPlugin):
    """Tells one cluster object which workers are there.

    distributed's have one name, so that the second object takes the first one's place (2026.8.0).
    """

    def __init__(self, scheduler: Scheduler, comm: Any) -> None:  # noqa: ANN401 - distributed has no types
        self.name = f"{WorkerStatusPlugin.name}-{id(comm)}"
        super().__init__(scheduler, comm)


def subscribe(scheduler: Scheduler, comm: Any) -> dict[str, Any]:  # noqa: ANN401
    """Handle a cluster object's ``subscribe_worker_status`` as distributed's scheduler does, for any number of them."""
    Sight(scheduler, comm)
    facts: dict[str, Any] = scheduler.identity()
    for worker in facts["workers"].values():
        del worker["metrics"], worker["last_seen"]
    return facts


class Watchers:
    """The leaders' connections: an end of file, at either end, says that the other is gone."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._comms: dict[Any, str] = {}  # of each the place, which a node's leaders have one after another
        self._notes: dict[Any, tuple[str, Sequence[str]]] = {}
        self._left = asyncio.Event()
        self._dismissed = False

    def notes(self) -> list[tuple[str, str]]:
        """Return node and text of what the leaders say of their nodes (``hpcgpu_notes``)."""
        return [(node, text) for node, said in self._notes.values() for text in said]

    async def serve(
        self,
        comm: Any,  # noqa: ANN401 - distributed has no types
        node: str = "",
        place: str = "",
        notes: Sequence[str] = (),
    ) -> None:
        """Hold a leader's connection (``hpcgpu_watch``) until it ends."""
        self._comms[comm], self._notes[comm] = place, (node, notes)
        lost = True
        with contextlib.suppress(CommClosedError):
            await comm.write("watching")
            while await comm.read() != "bye":
                continue
            lost = False
        del self._comms[comm], self._notes[comm]
        self._left.set()
        if lost:
            asyncio.get_running_loop().call_later(_SUCCESSOR_S, self._report, node, place)

    def _report(self, node: str, place: str) -> None:
        if not self._dismissed and place not in self._comms.values():
            self._control.send("leader_lost", node=node)

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
