"""The worker process: bound first, then distributed's Worker on the spill store."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import psutil
import wrapt
from distributed import Worker
from distributed.http.routing import RoutingApplication

from hpcgpu import supervise
from hpcgpu.deploy import compat, network
from hpcgpu.deploy.dashboard.worker_metrics import WorkerMetrics
from hpcgpu.deploy.network.node_copies import this_process
from hpcgpu.deploy.processes import polars_engine
from hpcgpu.deploy.processes.control import Control, encode, failure_of
from hpcgpu.deploy.processes.handshakes import limit_handshakes
from hpcgpu.deploy.processes.heartbeats import StreamHeartbeats
from hpcgpu.deploy.processes.rmm import set_up_rmm
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import cuda_driver, host_memory, kernel_binding, log, peer_memory, process
from hpcgpu.model import WorkerSpec
from hpcgpu.model.settings import Limit
from hpcgpu.model.worker import Rapids
from hpcgpu.spill import GpuSpillBuffer, SpillPlugin
from hpcgpu.spill.devices.pools import evict_on_failure
from hpcgpu.units import format_bytes

# The store's logger. Its few INFO lines are shown although a run logs from WARNING on.
logger = logging.getLogger("distributed.worker.memory")
_ROUTES = "distributed.worker.http.routes"


def usage_file(spec: WorkerSpec) -> Path:
    """Return where a simulated GPU publishes its used bytes, for the nanny's memory monitor."""
    return Path(spec.local_directory) / f"{spec.name}.device"


def usage_reader(spec: WorkerSpec) -> Callable[[], int]:
    """Return a function that says how many bytes of the worker's host memory are simulated device memory."""
    if not spec.simulated:
        return lambda: 0
    from hpcgpu.sim import read_usage_bytes

    return functools.partial(read_usage_bytes, usage_file(spec))


def open_device(spec: WorkerSpec) -> None:
    """Make the worker's GPU the current one of this process; called once, after binding."""
    polars_engine.keep_binding(spec)
    if not spec.simulated:
        # CUDA_VISIBLE_DEVICES names it first: it is device 0, and its first user opens it
        # torch's or numba's arrays may be in the store before CuPy's
        wrapt.register_post_import_hook(lambda _: evict_on_failure(), "cupy")
        set_up_rmm(spec.rapids or Rapids())
        return
    from hpcgpu import sim
    from hpcgpu.sim.registration import register_sizes, register_with_arrays

    register_sizes()
    wrapt.register_post_import_hook(lambda _: register_with_arrays(), "dask.array")
    gpu = spec.binding.gpus[0]
    sim.set_current_gpu(
        sim.SimGpu(spec.device_memory_bytes, uuid=gpu.uuid, pci=gpu.pci, usage_file=os.fspath(usage_file(spec)))
    )


def check_device(spec: WorkerSpec) -> None:
    """Raise LaunchError if CUDA's first device in this process is another GPU than the worker's."""
    gpu = spec.gpu
    if gpu is None or spec.simulated or not gpu.uuid or (first := cuda_driver.first_device()) is None:
        return
    # else all workers of the node would compute on one GPU; how CUDA names MIG slices is not tried on hardware
    if not gpu.mig and first.uuid != gpu.uuid.lower().replace("gpu-", "GPU-"):
        raise LaunchError(
            f"worker {spec.name} is planned on {gpu.uuid} at {gpu.pci}, but CUDA's first device in its process is "
            f"{first.uuid}: something called CUDA before the worker set CUDA_VISIBLE_DEVICES. Look at preloads, "
            "sitecustomize, and an MPI for GPUs; hpcgpu run binds a worker before anything else runs in it"
        )
    if first.others:
        where = ", ".join(map(str, first.others))
        log.say(f"worker {spec.name} has a CUDA context on other GPUs, too (devices {where}): it takes their memory")


def open_context(address: str, spec: WorkerSpec) -> None:
    """Make the worker's CUDA context if it is to speak UCX, which asks at its start where the device is."""
    if address.startswith(("ucx:", "ucxx:")) and spec.gpu and not spec.simulated:
        try:  # UCX 1.21 without one: "set cuda sys_device to unknown", and it does not know which port is near
            cuda_driver.make_context()
        except (OSError, LaunchError) as e:  # a killed worker may still be on a GPU for one process
            log.say(f"worker {spec.name} speaks UCX without a CUDA context: UCX does not know its GPU's place: {e}")


class SilentWorker(Worker):
    """A Worker that opens no socket for HTTP, and that closes without interrupting a heartbeat.

    distributed (2026.8.0, Worker.close) closes its connections while a heartbeat waits for an answer, and logs a
    traceback for it, "Failed to communicate with scheduler during heartbeat".
    """

    _beat: asyncio.Task[Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.handlers["hpcgpu_save"] = nothing_to_save  # a checkpoint's plugin has another one

    def start_http_server(self, routes: list[Any], dashboard_address: object, *_: object, **__: object) -> None:
        """Make the application (Worker.start_unsafe needs one), but open no socket."""
        self.http_application = RoutingApplication(routes)
        self.http_server = SimpleNamespace(port=0, address="", stop=lambda: None)

    async def heartbeat(self) -> None:
        """Send a heartbeat; it ends without a log line when the worker closes."""
        self._beat = asyncio.current_task()  # of tornado's PeriodicCallback, which is stopped before it is cancelled
        try:
            await super().heartbeat()
        finally:
            self._beat = None

    async def run(self, comm: Any, function: bytes, *args: Any, **kwargs: Any) -> Any:
        """Run a function of Client.run, as distributed does; one of cudf-polars' engine in a thread."""
        return await super().run(comm, polars_engine.off_loop(function), *args, **kwargs)

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        """Close as distributed does, after cancelling a heartbeat under way, unless it is the caller."""
        self.periodic_callbacks["heartbeat"].stop()
        # The heartbeat task itself may close the worker. Later callers must not cancel it.
        beat, self._beat = self._beat, None
        if beat not in (None, asyncio.current_task()):
            beat.cancel()
            await asyncio.wait([beat])
        return await super().close(*args, **kwargs)


async def nothing_to_save(limit_s: float) -> list[str]:
    """Answer that a worker has nothing that a checkpoint lacks."""
    return []


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker process's parameters, pickled by the nanny."""

    spec: WorkerSpec
    kwargs: Mapping[str, Any]  # of distributed's Worker
    env: Mapping[str, str]
    config: Mapping[str, Any]
    sys_path: tuple[str, ...]  # the nanny's sys.path: UploadDirectory(update_path=True) changes it there
    leader_pid: int
    stream_heartbeats: bool  # its scheduler is one of hpcgpu


def main(start: WorkerStart, control: socket.socket) -> int:
    """Bind, then run the worker until told to stop; the entry of the forked process."""
    process.outlast(signal.SIGTERM)
    kernel_binding.bind(start.spec.binding)
    before = dict(os.environ)
    os.environ.update(start.env)
    os.environ.update(start.spec.env)
    host_memory.apply_variables(before, os.environ)
    sys.path[:] = start.sys_path
    dask.config.update(dask.config.config, start.config, priority="new")
    if not dask.config.get("temporary-directory", None):  # programs of tasks use guessable names in it
        dask.config.set({"temporary-directory": start.spec.local_directory})
    # It has no web server, and distributed's routes import prometheus_client; a user's are imported for their errors.
    dask.config.set({_ROUTES: [m for m in dask.config.get(_ROUTES) if not m.startswith("distributed.")]})
    compat.spare_nvml(start.spec.gpu is None)  # distributed would show the first GPU's load as this worker's
    limit_handshakes()
    network.prepare(start.kwargs["scheduler_ip"], node_copies=start.spec.node_copies)
    peer_memory.allow(start.leader_pid)  # the workers and the script descend from it
    try:
        open_device(start.spec)  # before the loop: RMM's log may be on a file system that hangs
        check_device(start.spec)
        open_context(start.kwargs["scheduler_ip"], start.spec)
    except Exception as e:
        report = failure_of(e)
        control.sendall(encode("error", **report))
        if not report["text"]:
            return 1
        raise
    return asyncio.run(_serve(start, control))


async def _serve(start: WorkerStart, sock: socket.socket) -> int:
    control, spec = await Control.open(sock), start.spec
    try:
        plugins = (SpillPlugin(spec, this_process), WorkerMetrics(spec))
        worker = SilentWorker(**start.kwargs, data=store_of(spec), dashboard=False, plugins=plugins)
        if start.stream_heartbeats:
            StreamHeartbeats(worker)
        compat.exclude_simulated(worker, usage_reader(spec))
        if logger.getEffectiveLevel() == logging.WARNING:
            logger.setLevel(logging.INFO)
        check_room(spec)
        await worker  # until it has registered
    except Exception as e:
        report = failure_of(e)
        control.send("error", **report)
        await control.drained()
        if not report["text"]:
            return 1
        raise
    control.send("started", address=worker.address, dir=worker.local_directory)
    stopping = stop_on_request(worker, control)
    await worker.finished()
    stopping.cancel()
    # non-daemonic threads of user code must not keep a closed worker alive
    log.flush()
    os._exit(0)


def check_room(spec: WorkerSpec) -> None:
    """Raise ConfigError if this process exceeds a memory limit before it has data: Dask would pause or end it."""
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
