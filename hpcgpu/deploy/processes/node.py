"""Plan a node's workers in a process on it: a leader, or for dask-jobqueue, dask-mpi and dask worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hpcgpu.errors import LaunchError
from hpcgpu.host import addresses, discover, host_memory, log, nvml
from hpcgpu.host.nvml import openable
from hpcgpu.launch import read_allocation
from hpcgpu.model import (
    Allocation,
    CpuSet,
    Gpu,
    HostMemory,
    NodeLayout,
    RunDocument,
    Settings,
    Topology,
    WorkerSpec,
)
from hpcgpu.model.allocation import SIMULATE, parse_simulated
from hpcgpu.model.settings import SHARE, read_disk_limit
from hpcgpu.plan.binding import simulated_gpus
from hpcgpu.plan.binding.memory import plan_host_memory, share_of
from hpcgpu.plan.binding.workers import NodeFacts, device_limits_lowered, plan_workers
from hpcgpu.report.machine import format_other_gpus
from hpcgpu.units import format_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """A node and its GPUs, or simulated ones, that this process may use."""

    name: str
    topology: Topology
    gpus: tuple[Gpu, ...]

    @classmethod
    def read(cls, settings: Settings, environ: Mapping[str, str]) -> Machine:
        """Read the node's topology and GPUs; raise LaunchError without a GPU."""
        host, topology = environ.get("SLURMD_NODENAME") or socket.gethostname(), discover.topology()
        if settings.gpus is None:
            log.say_of(host, topology.warnings)
        gpus = gpus_of(settings, topology, environ, host)
        if not gpus:
            devices = environ.get("CUDA_VISIBLE_DEVICES")
            shown = f"CUDA_VISIBLE_DEVICES={devices!r}" if devices is not None else ""
            reasons = "; ".join(filter(None, (shown, format_other_gpus(topology), nvml.read().trouble)))
            why = f" ({reasons})" if reasons else ""
            raise LaunchError(
                f"no GPU can be opened on {host}{why}: request GPUs from the batch system, or simulate them: {SIMULATE}"
            )
        return cls(host, topology, gpus)


def gpus_of(settings: Settings, topology: Topology, environ: Mapping[str, str], host: str) -> tuple[Gpu, ...]:
    """Return the GPUs of a node that this process may use: real ones, or simulated ones if the settings say so."""
    if settings.gpus is not None:
        simulated = parse_simulated(settings.gpus)
        return simulated_gpus(topology, simulated.per_node, simulated.memory_bytes, host)
    mine = {g.uuid for g in openable(environ)}
    return tuple(g for g in topology.gpus if g.uuid in mine)


def plan_here(
    settings: Settings,
    machine: Machine,
    workers: int,
    *,
    scratch: str,
    environ: Mapping[str, str],
    kept_bytes: int = 0,
    sharers: int = 1,
) -> tuple[WorkerSpec, ...]:
    """Plan ``workers`` workers, a multiple of ``workers_per_gpu``, one after the other on the machine's GPUs.

    A ``memory_limit`` in bytes comes from a caller that does not see the node (dask-jobqueue: the job's memory divided
    by processes). It is lowered to the worker's share, which :func:`lowered` reports. Otherwise the kernel would end
    the job before a worker spills. ``scratch`` is a private folder for their files, ``kept_bytes`` the job's host
    memory for other processes, ``sharers`` the processes like this one that share the job's memory on this node. Raises
    LaunchError, ConfigError, BindingError: more workers than GPUs, or impossible limits and cores.
    """
    limit_bytes = settings.memory_limit.nbytes
    planned = replace(settings, memory_limit=SHARE) if limit_bytes else settings
    layout = NodeLayout(0, (0,), (tuple(range(workers)),))
    share = host_share(read_allocation(environ, machine.name), kept_bytes=kept_bytes, part=(1, sharers))
    specs = plan_node(planned, machine, layout, share, scratch=scratch, environ=environ)
    if not limit_bytes:
        return specs
    return tuple(replace(s, memory_limit_bytes=min(limit_bytes, s.memory_limit_bytes or limit_bytes)) for s in specs)


class HostShare(NamedTuple):
    """The host memory of one planner's workers."""

    memory: HostMemory
    in_job: bool  # granted by a batch system


def host_share(
    allocation: Allocation, run: RunDocument | None = None, *, kept_bytes: int = 0, part: tuple[int, int] = (1, 1)
) -> HostShare:
    """Return the host memory of this job on this node, less ``kept_bytes`` for other processes, or a part of it.

    ``part`` is this planner's share, and the sum of all planners' shares.
    """
    memory = plan_host_memory(host_memory.memory_limit(), allocation, run)
    left = share_of(HostMemory(memory.nbytes - kept_bytes, memory.source), *part)
    return HostShare(left, allocation.batch != "local")


def plan_node(
    settings: Settings,
    machine: Machine,
    layout: NodeLayout,
    share: HostShare,
    *,
    scratch: str,
    environ: Mapping[str, str],
    before: Sequence[NodeLayout] = (),
    **more: Any,
) -> tuple[WorkerSpec, ...]:
    """Plan the workers of one process on this node: of a leader, or of a process without ranks.

    ``scratch`` is a private folder for their files; ``more`` are further fields of NodeFacts. The others are as of
    :func:`hpcgpu.plan.binding.workers.plan_workers`.
    """
    gpus, topology = machine.gpus, machine.topology
    facts = facts_of(machine.name, topology, share.memory, environ, gpus=gpus, scratch=scratch, in_job=share.in_job)
    return tuple(spec for _, spec in plan_workers(settings, replace(facts, **more), layout, before))


def facts_of(
    host: str,
    topology: Topology,
    memory: HostMemory,
    environ: Mapping[str, str],
    *,
    gpus: tuple[Gpu, ...] = (),
    scratch: str = "",
    in_job: bool,
) -> NodeFacts:
    """Return the facts of this node, with the cores, memory nodes and interfaces that this process may use."""
    return NodeFacts(
        name=host,
        topology=topology,
        gpus=gpus,
        allowed=CpuSet(os.sched_getaffinity(0)),
        allowed_nodes=host_memory.granted_memory_nodes(),
        memory=memory,
        environ=environ,
        scratch=scratch,
        interfaces=addresses.usable_interfaces(),
        in_job=in_job,
    )


def folder_notes(settings: Settings, workers: int) -> tuple[str, ...]:
    """Return notes, once per node, about the folder to which its workers spill."""
    import dask.config  # imported here: hpcgpu topo needs neither Dask nor the store

    from hpcgpu.spill.storage import notes, trust_note

    folder = settings.local_directory
    each_bytes = read_disk_limit(dask.config.get("distributed.worker.memory.max-spill"))
    trusted = trust_note(folder) if settings.trust_local_directory else ()
    return (*trusted, *notes(folder, each_bytes * workers))


def lowered(settings: Settings, specs: tuple[WorkerSpec, ...]) -> tuple[str, ...]:
    """Return messages about memory limits that had to be lowered."""
    on_device = device_limits_lowered(settings, specs)
    limit_bytes, limit = settings.memory_limit.nbytes, specs[0].memory_limit_bytes
    if not limit_bytes or limit is None or limit >= limit_bytes:
        return on_device
    return (
        *on_device,
        f"memory_limit={format_bytes(limit_bytes)} (set by {settings.where('memory_limit')}) is lowered to "
        f"{format_bytes(limit)}, a worker's share of what this job may use on the node: above it the kernel would "
        "end the job before a worker spills",
    )
