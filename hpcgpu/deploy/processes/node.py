"""A node: what this process may use of it, and the plan of its workers."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace

from hpcgpu.errors import LaunchError, opt, plain
from hpcgpu.host import addresses, discover, host_memory, kernel_binding, log, nvml, ucx
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import CpuSet, Gpu, HostMemory, NodeLayout, RunDocument, Settings, Topology, WorkerSpec
from hpcgpu.model.allocation import NO_GPU, parse_simulated
from hpcgpu.model.settings import SHARE, read_disk_limit
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.workers import NodeFacts, device_limits_lowered, plan_host_memory, plan_workers, share_of
from hpcgpu.report.machine import format_other_gpus
from hpcgpu.units import format_bytes


def read_node(settings: Settings, environ: Mapping[str, str]) -> NodeFacts:
    """Read this node with the GPUs, or simulated ones, that this process may use; raise LaunchError without a GPU."""
    host, topology = environ.get("SLURMD_NODENAME") or socket.gethostname(), discover.topology()
    if settings.gpus is None:
        log.say_of(host, topology.warnings)
    gpus = gpus_of(settings, topology, environ, host)
    if not gpus:
        devices = environ.get("CUDA_VISIBLE_DEVICES")
        shown = f"CUDA_VISIBLE_DEVICES={devices!r}" if devices is not None else ""
        raise LaunchError(f"no GPU can be opened on {host}{_why_not(topology, shown)}: {NO_GPU}")
    return facts_of(host, topology, gpus, environ)


def _why_not(topology: Topology, shown: str = "") -> str:
    """Return the reasons why GPUs of this node cannot be opened, in parentheses; "" without any."""
    reasons = "; ".join(filter(None, (shown, format_other_gpus(topology), nvml.read().trouble)))
    return f" ({reasons})" if reasons else ""


def facts_of(
    host: str, topology: Topology, gpus: tuple[Gpu, ...], environ: Mapping[str, str], run: RunDocument | None = None
) -> NodeFacts:
    """Return what this process may use here: cores, memory nodes, interfaces, and the memory of its job."""
    allocation = read_allocation(environ, host)
    chosen = {**environ, **(run.settings.env if run else {})}
    return NodeFacts(
        name=host,
        topology=topology,
        gpus=gpus,
        allowed=CpuSet(os.sched_getaffinity(0)),
        allowed_nodes=kernel_binding.granted_memory_nodes(),
        memory=plan_host_memory(host_memory.memory_limit(topology.gpu_memory_nodes), allocation, run),
        environ=environ,
        interfaces=addresses.usable_interfaces(),
        in_job=allocation.batch != "local",
        ucx_without_ib=ucx.without_infiniband(topology, chosen),
    )


def gpus_of(settings: Settings, topology: Topology, environ: Mapping[str, str], host: str) -> tuple[Gpu, ...]:
    """Return the GPUs of a node that this process may use: real ones, or simulated ones if the settings say so."""
    if settings.gpus is not None:
        simulated = parse_simulated(settings.gpus)
        return simulated_gpus(topology, simulated.per_node, simulated.memory_bytes, host)
    mine = {g.uuid for g in nvml.visible_gpus(nvml.read().gpus, environ.get("CUDA_VISIBLE_DEVICES"))}
    return tuple(g for g in topology.gpus if g.uuid in mine)


def requested_gpus(settings: Settings, topology: Topology, environ: Mapping[str, str], host: str) -> tuple[Gpu, ...]:
    """Return what :func:`gpus_of` does; raise LaunchError for fewer than ``gpus_per_node``."""
    gpus = gpus_of(settings, topology, environ, host)
    if len(gpus) < (settings.gpus_per_node or 0):
        raise LaunchError(
            f"{settings.gpus_per_node} GPUs per node were asked for ({settings.where('gpus_per_node')}), "
            f"but {len(gpus)} can be opened on {host}{_why_not(topology)}"
        )
    return gpus


def plan_here(
    settings: Settings, facts: NodeFacts, workers: int, *, scratch: str, kept_bytes: int = 0, sharers: int = 1
) -> tuple[WorkerSpec, ...]:
    """Plan ``workers`` workers, a multiple of ``workers_per_gpu``, for one of ``sharers`` processes of a job and node.

    ``kept_bytes`` of the job's memory are for other processes. A memory limit in bytes is lowered to the worker's
    share: it comes from a caller that does not see the node (dask-jobqueue: the job's memory divided by processes), and
    the kernel would end the job before a worker spills. Raises LaunchError, ConfigError, BindingError: more workers
    than GPUs, or impossible limits and cores.
    """
    limit_bytes = settings.memory_limit.nbytes
    planned = replace(settings, memory_limit=SHARE) if limit_bytes else settings
    layout = NodeLayout(0, (0,), (tuple(range(workers)),))
    memory = share_of(HostMemory(facts.memory.nbytes - kept_bytes, facts.memory.source), 1, sharers)
    planned_workers = plan_workers(planned, replace(facts, memory=memory, scratch=scratch), layout)
    specs = tuple(spec for _, spec in planned_workers)
    if not limit_bytes:
        return specs
    return tuple(replace(s, memory_limit_bytes=min(limit_bytes, s.memory_limit_bytes or limit_bytes)) for s in specs)


def folder_notes(settings: Settings, workers: int) -> tuple[str, ...]:
    """Return notes, once per node, about the folder to which its workers spill."""
    import dask.config  # imported here: hpcgpu topo needs neither Dask nor the store

    from hpcgpu.host.scratch import notes, trust_note

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
        f"{plain(opt('memory_limit', format_bytes(limit_bytes), settings.where('memory_limit')))} is lowered to "
        f"{format_bytes(limit)}, a worker's share of what this job may use on the node: above it the kernel would "
        "end the job before a worker spills",
    )
