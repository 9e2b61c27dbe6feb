"""The scheduler process: distributed's Scheduler, its guarded dashboard, the client's lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler
from distributed.core import CommClosedError
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcgpu.deploy import compat
from hpcgpu.deploy.control import Control
from hpcgpu.deploy.trust import Certificate, security
from hpcgpu.errors import JobError
from hpcgpu.host import process

_DISMISS_S = 4.0
# A client's gather() must have looked at the errors before it hears that the connection is lost.
_TELL_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """What the scheduler process starts with.

    Attributes
    ----------
    host : str
        Where it listens; ``0.0.0.0`` when ranks of other nodes or a client outside must reach it.
    dashboard_secret : str
        First part of every URL of the dashboard; empty: no dashboard.

    """

    host: str
    protocol: str
    interface: str | None = None
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
        host=None if spec.interface else spec.host,
        interface=spec.interface,
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
    watchers = Watchers()
    scheduler.handlers["hpcgpu_watch"] = watchers.serve
    scheduler.handlers["hpcgpu_failed"] = lambda text: control.send("failed", text=text)
    lease = Lease(spec.client_grace_s, control)
    scheduler.handlers["hpcgpu_lease"] = lease.renew
    renewals: asyncio.Task[None] | None = None
    control.send("started", port=scheduler.port, address=scheduler.address, dashboard_port=scheduler.http_server.port)
    async for message in control.messages():
        if message["op"] == "lease":  # from now on a client outside must be heard from
            renewals = asyncio.create_task(lease.keep())
        elif message["op"] == "close":
            if renewals:
                renewals.cancel()
            if message["failed"]:
                compat.fail_futures(scheduler, JobError(f"the job ended: {message['reason']}"))
                await asyncio.sleep(_TELL_S)
            await watchers.dismiss()
            await scheduler.close(reason=message["reason"])
            return
    os._exit(1)  # the rank is gone: nobody is left to close for


class Watchers:
    """The leaders' connections: an end of file, at either end, says that the other is gone."""

    def __init__(self) -> None:
        self._comms: set[Any] = set()
        self._left = asyncio.Event()

    async def serve(self, comm: Any) -> None:  # noqa: ANN401 - distributed has no types
        """Hold a leader's connection (``hpcgpu_watch``) until it ends."""
        self._comms.add(comm)
        with contextlib.suppress(CommClosedError):
            await comm.write("watching")
            while True:
                await comm.read()
        self._comms.discard(comm)
        self._left.set()

    async def dismiss(self) -> None:
        """Tell the leaders that the run ends, and wait until they have ended their workers.

        A nanny whose scheduler is gone takes 1.6 s to close.
        """
        for comm in self._comms:
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


class Lease:
    """The client outside must be heard from within ``grace_s``; a goodbye ends the job at once."""

    def __init__(self, grace_s: float, control: Control) -> None:
        self.grace_s, self.control = grace_s, control
        self._last = time.monotonic()
        self._ended = asyncio.Event()
        self._why = ""

    def renew(self, goodbye: bool = False) -> str:
        """Handle a client's sign of life (``hpcgpu_lease``)."""
        self._last = time.monotonic()
        if goodbye:
            self._why = "the client said goodbye"
            self._ended.set()
        return "OK"

    async def keep(self) -> None:
        """Wait until the lease has ended, then tell rank 0."""
        self._last = time.monotonic()
        while not self._ended.is_set():
            left = self._last + self.grace_s - time.monotonic()
            if left <= 0:
                self._why = f"the client has not been heard from for {self.grace_s:g} s"
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), left)
        self.control.send("end", reason=self._why)
