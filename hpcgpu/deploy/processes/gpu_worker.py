"""A Worker class for programs that start workers themselves: ``dask-mpi --worker-class hpcgpu.GPUWorker``.

It binds the process in which it is made, and takes the next free GPU of the node. No nanny watches it: a worker that
dies stays dead (``hpcgpu run`` and ``python -m hpcgpu.worker`` have nannies).
"""

from __future__ import annotations

import atexit
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgpu.deploy import compat
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy.dashboard import WorkerMetrics
from hpcgpu.deploy.network import protocols
from hpcgpu.deploy.processes import devices, node
from hpcgpu.deploy.processes.stalls import limit_handshakes
from hpcgpu.deploy.processes.worker import SilentWorker, check_room, store_of
from hpcgpu.deploy.processes.worker_plugin import SpillPlugin
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import log, process, remover
from hpcgpu.host.private import hidden_name
from hpcgpu.launch import is_isolated, read_launch, read_rank
from hpcgpu.model import CpuSet, Gpu, RankFacts, Settings, WorkerSpec
from hpcgpu.model.settings import WORKER
from hpcgpu.spill.storage import Scratch

# The scheduler and the client of dask-mpi may be ranks of this node: twice the 118 MiB that both had idle (Pss,
# distributed 2026.8).
_OTHERS_BYTES = 256 << 20
_marks: list[socket.socket] = []  # held until this process ends


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
                "data= of GPUWorker: it has hpcgpu's own store; options of it are device_memory_limit, memory_limit, "
                "local_directory and jit_unspill"
            )
        settings = _read_settings(kwargs)
        scratch = Scratch.make(settings.local_directory, "worker", trusted=settings.trust_local_directory)
        remover.start(str(scratch.lock_path))
        atexit.register(scratch.remove)
        spec = _plan(settings, str(scratch.path), dict(os.environ))
        first = spec.name.endswith("-0")
        spec = replace(spec, name=str(kwargs.get("name") or spec.name).replace("/", "_"))
        process.bind_all_threads(spec.binding)
        os.environ.update(spec.env)
        devices.open_device(spec)
        check_room(spec)
        ours: dict[str, Any] = {
            "nthreads": spec.nthreads,
            "memory_limit": spec.memory_limit_bytes or 0,
            "local_directory": spec.local_directory,
            "data": store_of(spec),
            "plugins": (*plugins, SpillPlugin(spec), WorkerMetrics(spec)),
            "dashboard": False,
        }
        if settings.interface and not kwargs.get("host"):
            ours["interface"] = settings.interface
        limit_handshakes()
        super().__init__(*args, **{"name": spec.name, **kwargs, **ours})
        protocols.prepare(self.scheduler.address)
        compat.exclude_simulated(self, devices.usage_reader(spec))
        if first:
            log.say_of(socket.gethostname(), (protocols.exposed(self.scheduler.address.partition("://")[0]),))


def _read_settings(kwargs: dict[str, Any]) -> Settings:
    """Return the settings; options that distributed's Worker does not know are taken out of its arguments."""
    options = {name: kwargs.pop(name) for name in (*WORKER, "respect_launcher") if name in kwargs}
    # the Worker itself takes protocol, resources and death_timeout
    shared = ("nthreads", "memory_limit", "local_directory", "interface")
    options |= {name: kwargs[name] for name in shared if kwargs.get(name) not in (None, "")}
    return all_settings.read(options, "keyword {name} of GPUWorker").settings


def _plan(settings: Settings, scratch: str, environ: Mapping[str, str]) -> WorkerSpec:
    """Return this process's worker, planned as one of all workers of this node: no two have the same cores."""
    rank, each = read_rank(environ), settings.workers_per_gpu
    machine = node.Machine.read(settings, environ)
    shares = [gpu for gpu in machine.gpus for _ in range(each)]
    ranks = _ranks_here(rank, environ)
    # the scheduler's rank counts, too: ranks are not told which it is
    together = min(len(shares), ranks or len(shares))
    together += -together % each
    number = _take_share(shares[:together], each, environ)
    common: dict[str, Any] = {"scratch": scratch, "environ": environ, "kept_bytes": _OTHERS_BYTES}
    # a rank's own share of the node, and no other rank's
    tied = settings.respect_launcher or environ.get("SLURM_CPU_BIND_TYPE", "").startswith(("mask", "map"))
    if is_isolated(environ) or tied:
        alone = replace(machine, gpus=(shares[number],) * each)
        spec = node.plan_here(settings, alone, each, sharers=max((ranks or 1) // each, 1), **common)[0]
    else:
        _widen(rank, machine.name)
        spec = node.plan_here(settings, machine, together, **common)[number]
    notes = node.folder_notes(settings, together) if number == 0 else ()
    log.say_of(machine.name, (*node.lowered(settings, (spec,)), *notes))
    return spec


def _take_share(shares: Sequence[Gpu], each: int, environ: Mapping[str, str]) -> int:
    """Return the number of the first share of a GPU that no other process of this launch on this node has taken.

    The mark is an abstract socket: the kernel gives its name to one process only, until that process ends.
    """
    # MPICH's mpiexec and dask worker name no launch: the job names it, or the process that started this node's ranks
    launch = read_launch(environ) or environ.get("PBS_JOBID") or str(os.getppid())
    for number, gpu in enumerate(shares):
        name = hidden_name(launch, gpu.uuid or gpu.pci, number % each)
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(name)
        except OSError:
            mark.close()
            continue
        _marks.append(mark)
        return number
    raise LaunchError(
        f"each of the {len(shares) // each} GPUs of {socket.gethostname()} that this process may use has its worker "
        "already: start one rank for each GPU of a node, and those of the scheduler and of the client beside them"
    )


def _ranks_here(rank: RankFacts, environ: Mapping[str, str]) -> int | None:
    """Return the number of this node's ranks, about; None without a launcher."""
    if rank.local_size or rank.launcher == "none":
        return rank.local_size
    nodes = environ.get("SLURM_STEP_NUM_NODES", "1")  # srun does not tell a rank how many its node has
    return math.ceil(rank.size / int(nodes))


def _widen(rank: RankFacts, host: str) -> None:
    """Undo mpirun's binding of each rank to a core: the job's cores are those that its daemon, our parent, may use.

    srun's binding stays: its daemon is root's, and may use the whole node.
    """
    mask, parent = CpuSet(os.sched_getaffinity(0)), os.getppid()
    if rank.launcher in ("none", "srun") or Path(f"/proc/{parent}").stat().st_uid != os.getuid():
        return
    together = CpuSet(mask | os.sched_getaffinity(parent))
    if together != mask:
        os.sched_setaffinity(0, together)
        text = f"{rank.launcher} tied rank {rank.rank} to PUs {mask}, but its worker has a share of all, PUs {together}"
        log.say_of(host, (f"{text} (respect_launcher keeps it on its own PUs)",))
