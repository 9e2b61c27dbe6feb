"""The worker process: bound first, then distributed's Worker on the spill store; and GPUWorker for other programs.

``dask-mpi --worker-class hpcgpu.GPUWorker`` binds the process in which it is made, and takes the next free GPU of the
node. No nanny watches it: a worker that dies stays dead (``hpcgpu run`` and ``python -m hpcgpu.worker`` have nannies).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import importlib.util
import logging
import math
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import psutil
import wrapt
from distributed import Worker
from distributed.http.routing import RoutingApplication

from hpcgpu import supervise
from hpcgpu.deploy import compat, network, processes
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy.dashboard import WorkerMetrics
from hpcgpu.deploy.network.node_copies import this_process
from hpcgpu.deploy.processes import Control, encode
from hpcgpu.deploy.processes.stalls import limit_handshakes
from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError, cause_of, message_of
from hpcgpu.host import cuda_driver, host_memory, log, peer_memory, process, remover, scratch
from hpcgpu.host.private import claim, release
from hpcgpu.host.scratch import Scratch
from hpcgpu.launch import is_isolated, read_launch, read_rank
from hpcgpu.model import CpuSet, Gpu, RankFacts, Settings, WorkerSpec
from hpcgpu.model.settings import WORKER, Limit
from hpcgpu.model.topology import Rapids
from hpcgpu.spill import GpuSpillBuffer, SpillPlugin
from hpcgpu.spill.devices import allocation_failure
from hpcgpu.spill.devices.libraries import spill_itself
from hpcgpu.spill.devices.pools import evict_on_failure
from hpcgpu.units import format_bytes

# The store's logger. Its few INFO lines are shown although a run logs from WARNING on.
logger = logging.getLogger("distributed.worker.memory")
# They observe allocations, and stand above the resources that may fail: below, they would count each retry.
_OBSERVERS = ("LoggingResourceAdaptor", "TrackingResourceAdaptor")
_EXTRA = "pip install '.[rapids]' in a clone of hpcgpu"


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
    # MPI, a preload or a sitecustomize may have called cuInit before CUDA_VISIBLE_DEVICES was set: all workers of the
    # node would compute on one GPU. MIG slices are not compared: how CUDA names them is not tried on hardware.
    gpu = spec.gpu
    if gpu is None or spec.simulated or not gpu.uuid or (first := cuda_driver.first_device()) is None:
        return
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
    # UCX 1.21 without a context: "set cuda sys_device to unknown", and it does not know which port is near.
    if address.startswith(("ucx:", "ucxx:")) and spec.gpu and not spec.simulated:
        try:
            cuda_driver.make_context()
        except (OSError, LaunchError) as e:  # a killed worker may still be on a GPU for one process
            log.say(f"worker {spec.name} speaks UCX without a CUDA context: UCX does not know its GPU's place: {e}")


def set_up_rmm(rapids: Rapids) -> None:
    """Set up RMM and its users on the current CUDA device; cuDF reads its part from the environment.

    ConfigError: a library is not installed. LaunchError: too little memory is left, or the driver lacks a feature.
    """
    for module, option in rapids.needs:
        if importlib.util.find_spec(module) is None:
            how = {"torch": "pip install torch", "cupy": "pip install '.[cupy]' in a clone of hpcgpu"}.get(
                module, _EXTRA
            )
            raise ConfigError(
                f"{option} needs {module}, which is not installed for the workers' Python: {how}, or leave the option "
                "out"
            )
    option = next((option for module, option in rapids.needs if module == "rmm"), "")
    try:
        if option:
            _allocate_by(rapids)
        else:
            _evict_once_imported()
        for library in rapids.libraries:
            _SETTERS[library]()
    except (MemoryError, RuntimeError, ValueError, ImportError) as e:
        names = " on ".join(name for name, _ in reversed(rapids.resources)) or ", ".join(rapids.libraries)
        raise LaunchError(f"{option}: RMM does not set up {names} on this GPU: {message_of(e)}") from e


def _evict_once_imported() -> None:
    """Let failing allocations of RMM make the store evict, from RMM's import on, though no option asks for RMM."""
    # distributed imports RMM if it is installed (2026.8.0: worker.py); else cuDF or user code does. A resource that
    # user code sets later evicts nothing.

    def evict_by(rmm: Any) -> None:
        try:
            rmm.mr.set_current_device_resource(evicting(rmm.mr.get_current_device_resource()))
        except RuntimeError as e:  # a worker that does not use it works without
            logger.warning("RMM is installed but fails on this GPU, and evicts nothing for its allocations: %s", e)

    wrapt.register_post_import_hook(evict_by, "rmm")


def _allocate_by(rapids: Rapids) -> None:
    """Stack the resources; rmm.reinitialize has no asynchronous one and no limit (26.10)."""
    import rmm

    below: tuple[Any, ...] = ()
    for name, arguments in (each for each in rapids.resources if each[0] not in _OBSERVERS):
        below = (getattr(rmm.mr, name)(*below, **dict(arguments)),)
    resource = evicting(below[0] if below else rmm.mr.get_current_device_resource())
    for name, arguments in (each for each in rapids.resources if each[0] in _OBSERVERS):
        options = dict(arguments)
        if "log_file_name" in options:
            scratch.make_private(Path(str(options["log_file_name"])).parent)
        resource = getattr(rmm.mr, name)(resource, **options)
    rmm.mr.set_current_device_resource(resource)


def evicting(resource: Any) -> Any:
    """Return a resource of RMM over another one. Its failing allocations make the store evict, and are retried."""
    import rmm

    def make_room(nbytes: int) -> bool:  # called again after each try that fails; this device is the first it sees
        return allocation_failure.evict(0, nbytes) or spill_itself(nbytes)

    # cuDF refuses to put its own callback beside ours (spill_manager.py, 26.10), which calls cuDF's
    wrapt.register_post_import_hook(lambda module: module.set_option("spill_on_demand", False), "cudf")
    return rmm.mr.FailureCallbackResourceAdaptor(resource, make_room)


def _set_cupy() -> None:
    import cupy
    from rmm.allocators.cupy import rmm_cupy_allocator

    cupy.cuda.set_allocator(rmm_cupy_allocator)


def _set_torch() -> None:
    import torch  # type: ignore[import-not-found] # of no extra of ours
    from rmm.allocators.torch import rmm_torch_allocator

    if rmm_torch_allocator is None:
        raise RuntimeError("this PyTorch is built without CUDA, or sees no GPU")
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)


_SETTERS = {"cupy": _set_cupy, "torch": _set_torch}


# The leader gives retiring workers 4 s after a SIGTERM.
_OUTLAST_S = 10


class SilentWorker(Worker):
    """A Worker that opens no socket for HTTP, and that closes without interrupting a heartbeat."""

    # distributed (2026.8.0, Worker.close) closes its connections while a heartbeat waits for an answer, and logs a
    # traceback for it, "Failed to communicate with scheduler during heartbeat".
    _beat: asyncio.Task[Any] | None = None

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

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        """Close as distributed does, after cancelling a heartbeat under way, unless it is the caller."""
        self.periodic_callbacks["heartbeat"].stop()
        # The heartbeat task itself may close the worker. Later callers must not cancel it.
        beat, self._beat = self._beat, None
        if beat not in (None, asyncio.current_task()):
            beat.cancel()
            await asyncio.wait([beat])
        return await super().close(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A worker process's parameters, pickled by the nanny."""

    spec: WorkerSpec
    kwargs: Mapping[str, Any]  # of distributed's Worker
    env: Mapping[str, str]
    config: Mapping[str, Any]
    sys_path: tuple[str, ...]  # the nanny's sys.path: UploadDirectory(update_path=True) changes it there
    leader_pid: int


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
    network.prepare(start.kwargs["scheduler_ip"], node_copies=start.spec.node_copies)
    peer_memory.allow(start.leader_pid)  # the workers and the script descend from it
    try:
        open_device(start.spec)  # before the loop: RMM's log may be on a file system that hangs
        check_device(start.spec)
        open_context(start.kwargs["scheduler_ip"], start.spec)
    except Exception as e:
        report, is_known = _failure(e)
        control.sendall(encode("error", **report))
        if is_known:
            return 1
        raise
    return asyncio.run(_serve(start, control))


async def _serve(start: WorkerStart, sock: socket.socket) -> int:
    control, spec = await Control.open(sock), start.spec
    try:
        plugins = (SpillPlugin(spec, this_process), WorkerMetrics(spec))
        worker = SilentWorker(**start.kwargs, data=store_of(spec), dashboard=False, plugins=plugins)
        compat.exclude_simulated(worker, usage_reader(spec))
        if logger.getEffectiveLevel() == logging.WARNING:
            logger.setLevel(logging.INFO)
        check_room(spec)
        await worker  # until it has registered
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


# The scheduler and the client of dask-mpi may be ranks of this node: twice the 118 MiB that both had idle (Pss,
# distributed 2026.8).
_OTHERS_BYTES = 256 << 20


class GPUWorker(SilentWorker):
    """distributed's Worker, bound to the cores beside the next free GPU of this node, on the spill store.

    Parameters
    ----------
    *args
        As of distributed's Worker: the scheduler's address.
    plugins : sequence
        As of distributed's Worker.
    **kwargs
        As of distributed's Worker, and options of ``hpcgpu.model.Settings`` that are about a worker:
        ``jit_unspill``, ``device_memory_limit``, ``gpus`` ... (``hpcgpu.model.settings.WORKER``). ``memory_limit``
        above the worker's share of the node is lowered to it.

    Raises
    ------
    LaunchError
        Every GPU of the node has its worker already, or the node has no GPU.
    ConfigError, BindingError
        An option is wrong, or the cores are not available.

    Examples
    --------
    $ mpirun -n 5 dask-mpi --worker-class hpcgpu.GPUWorker --worker-options '{"gpus": "sim:4"}' --scheduler-file s.json

    """

    def __init__(self, *args: Any, plugins: Sequence[Any] = (), **kwargs: Any) -> None:
        if "data" in kwargs:
            raise ConfigError(
                "data=: GPUWorker has hpcgpu's store: device_memory_limit, memory_limit, local_directory, jit_unspill"
            )
        if not any((args, kwargs.get("scheduler_ip"), kwargs.get("scheduler_file"), all_settings.scheduler_address())):
            raise ConfigError("the scheduler is missing: GPUWorker('tls://10.0.0.1:8786'), or scheduler_file='FILE'")
        options = {name: kwargs.pop(name) for name in (*WORKER, "respect_launcher") if name in kwargs}
        # the Worker itself takes protocol, resources and death_timeout
        shared = ("nthreads", "memory_limit", "local_directory", "interface")
        options |= {name: kwargs[name] for name in shared if kwargs.get(name) not in (None, "")}
        settings = all_settings.read(options, "keyword {name} of GPUWorker").settings
        scratch = Scratch.make(settings.local_directory, "worker", trusted=settings.trust_local_directory)
        remover.start(str(scratch.lock_path))
        atexit.register(scratch.remove)
        with contextlib.ExitStack() as claims:  # given back by close(), or if this fails
            spec = _plan(settings, str(scratch.path), dict(os.environ), claims)
            first = spec.name.endswith("-0")
            spec = replace(spec, name=str(kwargs.get("name") or spec.name).replace("/", "_"))
            process.bind_all_threads(spec.binding)
            os.environ.update(spec.env)
            open_device(spec)
            check_device(spec)
            check_room(spec)
            ours: dict[str, Any] = {
                "nthreads": spec.nthreads,
                "memory_limit": spec.memory_limit_bytes or 0,
                "local_directory": spec.local_directory,
                "data": store_of(spec),
                "plugins": (*plugins, SpillPlugin(spec, this_process), WorkerMetrics(spec)),
                "dashboard": False,
            }
            if settings.interface and not kwargs.get("host"):
                ours["interface"] = settings.interface
            limit_handshakes()
            super().__init__(*args, **{"name": spec.name, **kwargs, **ours})
            network.prepare(self.scheduler.address, node_copies=spec.node_copies)
            open_context(self.scheduler.address, spec)
            compat.exclude_simulated(self, usage_reader(spec))
            if first:
                log.say_of(socket.gethostname(), (network.exposed(self.scheduler.address.partition("://")[0]),))
            self._claims = claims.pop_all()

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        """Close as distributed does, and give the GPU back."""
        try:
            return await super().close(*args, **kwargs)
        finally:
            self._claims.close()


def _plan(settings: Settings, scratch: str, environ: Mapping[str, str], claims: contextlib.ExitStack) -> WorkerSpec:
    """Return this process's worker, planned as one of all workers of this node: no two have the same cores."""
    rank, each = read_rank(environ), settings.workers_per_gpu
    # a rank's own share of the node, and no other rank's
    tied = settings.respect_launcher or environ.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask", "map"))
    is_alone = tied or is_isolated(environ)
    if not is_alone:
        _widen(rank, socket.gethostname())
    machine = processes.read_node(settings, environ)
    shares = [gpu for gpu in machine.gpus for _ in range(each)]
    ranks = rank.local_size  # of this node, about
    if not ranks and rank.launcher != "none":  # srun does not tell a rank how many its node has
        ranks = math.ceil(rank.size / int(environ.get("SLURM_STEP_NUM_NODES", "1")))
    # the scheduler's rank counts, too: ranks are not told which it is
    together = min(len(shares), ranks or len(shares))
    together += -together % each
    number = _take_share(shares[:together], each, environ, claims)
    common: dict[str, Any] = {"scratch": scratch, "kept_bytes": _OTHERS_BYTES}
    if is_alone:
        alone = replace(machine, gpus=(shares[number],) * each)
        spec = processes.plan_here(settings, alone, each, sharers=max((ranks or 1) // each, 1), **common)[0]
    else:
        spec = processes.plan_here(settings, machine, together, **common)[number]
    notes = processes.folder_notes(settings, together) if number == 0 else ()
    log.say_of(machine.name, (*processes.lowered(settings, (spec,)), *notes))
    return spec


def _take_share(shares: Sequence[Gpu], each: int, environ: Mapping[str, str], claims: contextlib.ExitStack) -> int:
    """Claim the first share of a GPU that no other worker of this launch on this node has; return its number."""
    # MPICH's mpiexec and dask worker name no launch: the job names it, or the process that started this node's ranks
    launch = read_launch(environ) or environ.get("PBS_JOBID") or str(os.getppid())
    for number, gpu in enumerate(shares):
        descriptor = claim(launch, gpu.uuid or gpu.pci, number % each)
        if descriptor is not None:
            claims.callback(release, descriptor)
            return number
    raise LaunchError(
        f"each of the {len(shares) // each} GPUs of {socket.gethostname()} that this process may use has its worker "
        "already: start one rank for each GPU of a node, and those of the scheduler and of the client beside them"
    )


def _widen(rank: RankFacts, host: str) -> None:
    """Undo mpirun's binding of each rank to a core: the job's cores are those that its daemon, our parent, may use."""
    # srun's binding stays: its daemon is root's, and may use the whole node
    mask, parent = CpuSet(os.sched_getaffinity(0)), os.getppid()
    if rank.launcher in ("none", "srun") or Path(f"/proc/{parent}").stat().st_uid != os.getuid():
        return
    together = CpuSet(mask | os.sched_getaffinity(parent))
    if together != mask:
        os.sched_setaffinity(0, together)
        text = f"{rank.launcher} tied rank {rank.rank} to PUs {mask}, but its worker has a share of all, PUs {together}"
        log.say_of(host, (f"{text} (respect_launcher keeps it on its own PUs)",))
