"""The worker process: bound first, then distributed's Worker on the spill store."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask
import psutil
from distributed import Worker
from distributed.http.routing import RoutingApplication

from hpcgpu import supervise
from hpcgpu.deploy import compat
from hpcgpu.deploy.dashboard import WorkerMetrics
from hpcgpu.deploy.network import protocols
from hpcgpu.deploy.network.node_copies import this_process
from hpcgpu.deploy.processes import Control, devices, encode
from hpcgpu.deploy.processes.stalls import limit_handshakes
from hpcgpu.deploy.processes.worker_plugin import SpillPlugin
from hpcgpu.errors import ConfigError, HpcGpuError, cause_of
from hpcgpu.host import host_memory, log, peer_memory, process
from hpcgpu.model import WorkerSpec
from hpcgpu.model.limit import Limit
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.units import format_bytes

# The store's logger. Its few INFO lines are shown although a run logs from WARNING on.
_SPILL_LOGGER = logging.getLogger("distributed.worker.memory")
# The leader gives retiring workers 4 s after a SIGTERM.
_OUTLAST_S = 10


class SilentWorker(Worker):
    """A Worker that opens no socket for HTTP, and that closes without interrupting a heartbeat.

    distributed (2026.8.0, ``Worker.close``) closes its connections while a heartbeat waits for the scheduler's answer,
    and logs a traceback for it, "Failed to communicate with scheduler during heartbeat".
    """

    _beat: asyncio.Task[Any] | None = None

    def start_http_server(self, routes: list[Any], dashboard_address: object, *_: object, **__: object) -> None:
        """Make the application (Worker.start_unsafe needs one), but open no socket."""
        self.http_application = RoutingApplication(routes)
        self.http_server = _NoServer()

    async def heartbeat(self) -> None:
        """Send a heartbeat; it ends without a log line when the worker closes."""
        self._beat = asyncio.current_task()  # of tornado's PeriodicCallback, which is stopped before it is cancelled
        try:
            await super().heartbeat()
        finally:
            self._beat = None

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        """Close as distributed does, after cancelling a heartbeat under way, unless it is the caller."""
        self.periodic_callbacks["heartbeat"].stop()
        # The heartbeat task itself may close the worker. Later callers must not cancel it.
        beat, self._beat = self._beat, None
        if beat not in (None, asyncio.current_task()):
            beat.cancel()
            await asyncio.wait([beat])
        return await super().close(*args, **kwargs)


class _NoServer:
    """The members of an HTTP server that Worker uses."""

    port = 0
    address = ""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker process's parameters, pickled by the nanny."""

    spec: WorkerSpec
    kwargs: Mapping[str, Any]  # of distributed's Worker
    env: Mapping[str, str]
    config: Mapping[str, Any]
    sys_path: tuple[str, ...]  # the nanny's sys.path: UploadDirectory(update_path=True) changes it there


def main(start: WorkerStart, control: socket.socket) -> int:
    """Bind, then run the worker until told to stop; the entry of the forked process."""
    process.outlast(signal.SIGTERM, _OUTLAST_S)
    process.bind(start.spec.binding)
    before = dict(os.environ)
    os.environ.update(start.env)
    os.environ.update(start.spec.env)
    host_memory.apply_variables(before, os.environ)
    sys.path[:] = start.sys_path
    dask.config.update(dask.config.config, start.config, priority="new")
    if not dask.config.get("temporary-directory", None):  # programs of tasks use guessable names in it
        dask.config.set({"temporary-directory": start.spec.local_directory})
    compat.spare_nvml(start.spec.gpu is None)  # distributed would show the first GPU's load as this worker's
    limit_handshakes()
    protocols.prepare(start.kwargs["scheduler_ip"])
    this_process.allowed = start.spec.node_copies
    if fork_server := psutil.Process().parent():
        peer_memory.allow(
            fork_server.ppid()
        )  # the leader: the node's workers, and the script of rank 0, descend from it
    try:
        devices.open_device(start.spec)  # before the loop: RMM's log may be on a file system that hangs
    except Exception as e:
        report, is_known = _failure(e)
        control.sendall(encode("error", **report))
        if is_known:
            return 1
        raise
    return asyncio.run(_serve(start, control))


async def _serve(start: WorkerStart, sock: socket.socket) -> int:
    control = await Control.open(sock)
    try:
        worker = await make_worker(start)
    except Exception as e:
        report, is_known = _failure(e)
        control.send("error", **report)
        await control.drained()
        if is_known:
            return 1
        raise
    control.send("started", address=worker.address, dir=worker.local_directory)
    stopping = stop_on_request(worker, control)
    await worker.finished()
    stopping.cancel()
    # non-daemonic threads of user code must not keep a closed worker alive
    log.flush()
    os._exit(0)


def _failure(error: Exception) -> tuple[dict[str, str], bool]:
    """Return the report to the nanny about a worker that cannot start, and True if its reason is complete."""
    cause = cause_of(error)
    message = str(cause) if isinstance(cause, HpcGpuError) else process.refused(cause)
    reason = message or "".join(traceback.format_exception_only(cause)).strip()
    return {"text": "".join(traceback.format_exception(error)), "reason": reason}, bool(message)


async def make_worker(start: WorkerStart) -> Worker:
    """Start a worker with the spill store; it has registered when this returns."""
    spec = start.spec
    worker = SilentWorker(
        **start.kwargs,
        data=store_of(spec),
        dashboard=False,
        plugins=(SpillPlugin(spec), WorkerMetrics(spec)),
    )
    compat.exclude_simulated(worker, devices.usage_reader(spec))
    if _SPILL_LOGGER.getEffectiveLevel() == logging.WARNING:
        _SPILL_LOGGER.setLevel(logging.INFO)
    check_room(spec)
    return await worker


def check_room(spec: WorkerSpec) -> None:
    """Raise ConfigError if this process exceeds a memory limit before it has data: Dask would pause or end it forever.

    Dask's fractions ``pause`` and ``terminate`` of the limit decide.
    """
    memory = dask.config.get("distributed.worker.memory")
    limit, parts = spec.memory_limit_bytes, [part for part in (memory["pause"], memory["terminate"]) if part]
    taken = psutil.Process().memory_info().rss
    if limit and parts and taken > (part := min(parts)) * limit:
        raise ConfigError(
            f"memory_limit is {format_bytes(limit)} for each worker, but its process takes {format_bytes(taken)} "
            f"before it has any data, and Dask stops it above {part} of the limit: give it more than "
            f"{format_bytes(taken / part)}, and much more for data, or have fewer workers on a node"
        )


def store_of(spec: WorkerSpec) -> tuple[type[GpuSpillBuffer], dict[str, Any]]:
    """Return the spill store as Worker's argument ``data``; the node's planner has warned about its folder."""
    memory = dask.config.get("distributed.worker.memory")
    return (
        GpuSpillBuffer,
        {
            "device_memory_limit": Limit(spec.device_memory_limit_bytes),
            "memory_limit": Limit(spec.memory_limit_bytes or 0),
            "jit_unspill": spec.jit_unspill,
            "target": memory["target"],
            "max_spill": memory["max-spill"],
            "quiet": True,
            "trust_local_directory": True,  # the folders above it were checked when the run's folder was made
        },
    )


def stop_on_request(worker: Worker, control: Control) -> asyncio.Task[None]:
    """Close the worker when the nanny asks for it; end it at once if it cannot close, or if the nanny is gone."""

    async def stop() -> None:
        async for message in control.messages():
            if message.pop("op") == "stop":
                await worker.close(nanny=False, **message)  # timeout, executor_wait, reason
                return
        os._exit(1)  # the nanny's process is gone

    return supervise.start(stop, "the end of the worker", lambda _: os._exit(1))
