"""Memory of one worker: where its pages go, and how much host and device memory it may fill."""

from __future__ import annotations

from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, Gpu, Topology
from hpcgpu.units import format_bytes


def plan_memory_nodes(topology: Topology, gpu: Gpu, allowed: CpuSet | None = None) -> tuple[str, CpuSet]:
    """Return memory policy and NUMA nodes of the worker of ``gpu``.

    The DRAM nodes of the GPU's package, as a preference: the kernel fills them first, the one
    next to the running core before the others, and then goes on to the rest. A strict policy on the
    GPU's own node would take half of the memory from a spilling worker: of 6 recorded node types
    with 4 NUMA nodes per package, all have half of their DRAM on nodes without a GPU.

    Parameters
    ----------
    topology : Topology
        The node.
    gpu : Gpu
        The worker's own GPU.
    allowed : CpuSet, optional
        NUMA nodes that the process may use (``Mems_allowed``); all if not given.

    Returns
    -------
    tuple of str and CpuSet
        ``preferred-many`` and the nodes; ``none`` and the only node, or no node when the GPU's
        locality is unknown.

    """
    nodes = {n.os_index: n for n in topology.numa_nodes if allowed is None or n.os_index in allowed}
    if len(nodes) <= 1:
        return "none", CpuSet(nodes)
    home = next((n for n in topology.numa_nodes if n.os_index == gpu.numa_node), None)
    near = CpuSet(i for i, n in nodes.items() if home is not None and n.package == home.package)
    return ("preferred-many", near) if near else ("none", CpuSet())


def plan_memory_limit_bytes(
    value: float | int | None, node_limit_bytes: int, workers: int, simulated_bytes: int = 0
) -> int | None:
    """Return the host memory of one worker; None is no limit.

    Parameters
    ----------
    value : float, int or None
        The setting: None for an equal share of the node, a fraction of the node's memory for each
        worker, or bytes for each worker; 0 for no limit.
    node_limit_bytes : int
        What this job may use on the node: the cgroup's limit, or all memory.
    workers : int
        Workers on the node.
    simulated_bytes : int
        Memory of all simulated GPUs of the node: it lies in host memory but is no host memory of
        the workers.

    Raises
    ------
    ConfigError
        Simulated GPUs leave nothing, or the workers' limits together are above what there is.

    """
    room = node_limit_bytes - simulated_bytes
    if value == 0:
        return None
    if room <= 0:
        raise ConfigError(
            f"the simulated GPUs of this node have {format_bytes(simulated_bytes)} together, but this job may use "
            f"{format_bytes(node_limit_bytes)} of host memory in all: take fewer or smaller ones (gpus='sim:2x256MiB')"
        )
    if value is None:
        return room // max(workers, 1)
    limit = int(value * room) if isinstance(value, float) else value
    if limit * workers > room:
        raise ConfigError(
            f"memory_limit={value!r} for each of {workers} workers is {format_bytes(limit * workers)}, but this job "
            f"may use {format_bytes(room)} on this node: leave memory_limit out for equal shares, or ask for more"
        )
    return limit


def plan_device_memory_limit_bytes(value: float | int, device_memory_bytes: int) -> int:
    """Return where spilling from the device begins, in bytes; 0 is never.

    Parameters
    ----------
    value : float or int
        A float is a fraction of the device's memory, an int is bytes; 0 turns spilling off.
    device_memory_bytes : int
        Size of the GPU's memory; 0 when unknown.

    Raises
    ------
    ConfigError
        A fraction of a memory whose size is unknown.

    """
    if not value:
        return 0
    if isinstance(value, float):
        if not device_memory_bytes:
            raise ConfigError(
                f"device_memory_limit={value} is a fraction, but the size of this GPU's memory is not known "
                "(NVML does not answer): give it in bytes, such as device_memory_limit='30GB'"
            )
        return int(value * device_memory_bytes)
    return min(value, device_memory_bytes) if device_memory_bytes else value
