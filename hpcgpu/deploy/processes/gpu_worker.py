"""GPUWorker: distributed's Worker for other programs, in a process that they have started.

``dask-mpi --worker-class hpcgpu.GPUWorker`` binds the process in which it is made, and takes the next free GPU of the
node. No nanny watches it: a worker that dies stays dead (``hpcgpu run`` and ``python -m hpcgpu.worker`` have nannies).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgpu.deploy import compat, network
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy.dashboard.worker_metrics import WorkerMetrics
from hpcgpu.deploy.dask_config import read_variables, scheduler_address
from hpcgpu.deploy.network.node_copies import this_process
from hpcgpu.deploy.processes import node, worker
from hpcgpu.deploy.processes.handshakes import limit_handshakes
from hpcgpu.deploy.processes.worker import SilentWorker
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import kernel_binding, log, remover
from hpcgpu.host.private import claim, release
from hpcgpu.host.scratch import Scratch
from hpcgpu.launch.environment import is_isolated, read_launch, read_rank
from hpcgpu.model import CpuSet, Gpu, RankFacts, Settings, WorkerSpec
from hpcgpu.model.settings import WORKER
from hpcgpu.spill import SpillPlugin

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
        if not any((args, kwargs.get("scheduler_ip"), kwargs.get("scheduler_file"), scheduler_address())):
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
            kernel_binding.bind_all_threads(spec.binding)
            os.environ.update(spec.env)
            read_variables(settings.env)
            worker.open_device(spec)
            worker.check_device(spec)
            worker.check_room(spec)
            ours: dict[str, Any] = {
                "nthreads": spec.nthreads,
                "memory_limit": spec.memory_limit_bytes or 0,
                "local_directory": spec.local_directory,
                "data": worker.store_of(spec),
                "plugins": (*plugins, SpillPlugin(spec, this_process), WorkerMetrics(spec)),
                "dashboard": False,
            }
            if settings.interface and not kwargs.get("host"):
                ours["interface"] = settings.interface
            limit_handshakes()
            super().__init__(*args, **{"name": spec.name, **kwargs, **ours})
            network.prepare(self.scheduler.address, node_copies=spec.node_copies)
            worker.open_context(self.scheduler.address, spec)
            compat.exclude_simulated(self, worker.usage_reader(spec))
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
    machine = node.read_node(settings, environ)
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
        spec = node.plan_here(settings, alone, each, sharers=max((ranks or 1) // each, 1), **common)[0]
    else:
        spec = node.plan_here(settings, machine, together, **common)[number]
    notes = node.folder_notes(settings, together) if number == 0 else ()
    log.say_of(machine.name, (*node.lowered(settings, (spec,)), *notes))
    return spec


def _take_share(shares: Sequence[Gpu], each: int, environ: Mapping[str, str], claims: contextlib.ExitStack) -> int:
    """Claim the first share of a GPU that no other worker of this launch on this node has; return its number."""
    launch = read_launch(environ) or environ.get("PBS_JOBID") or str(os.getppid())  # MPICH and dask worker name none
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
    mask, parent = CpuSet(os.sched_getaffinity(0)), os.getppid()
    # srun's binding stays: its daemon is root's, and may use the whole node
    if rank.launcher in ("none", "srun") or Path(f"/proc/{parent}").stat().st_uid != os.getuid():
        return
    together = CpuSet(mask | os.sched_getaffinity(parent))
    if together != mask:
        os.sched_setaffinity(0, together)
        text = f"{rank.launcher} tied rank {rank.rank} to PUs {mask}, but its worker has a share of all, PUs {together}"
        log.say_of(host, (f"{text} (respect_launcher keeps it on its own PUs)",))
