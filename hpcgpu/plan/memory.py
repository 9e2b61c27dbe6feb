"""Memory of one worker: where its pages go, and how much host and device memory it may fill."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, NumaNode, Topology
from hpcgpu.units import format_bytes


def plan_memory_nodes(
    topology: Topology,
    homes: Sequence[int | None],
    cpusets: Sequence[CpuSet] = (),
    allowed: CpuSet | None = None,
    policy: str = "preferred-many",
) -> tuple[tuple[str, CpuSet], ...]:
    """Return memory policy and NUMA nodes of each worker.

    The NUMA nodes of a package are divided over its workers: each has its GPU's own, and one
    without a GPU is that of the workers with cores there, or else of whom has least so far. On nodes with several NUMA
    nodes per package half of the memory is on ones without a GPU (all 6 recorded types), and a
    worker that spills needs its share of them. ``preferred-many`` is a preference: when they are full
    the kernel goes on to the others.

    Parameters
    ----------
    topology : Topology
        The node.
    homes : sequence of int or None
        The NUMA node of each worker's GPU; None: unknown.
    cpusets : sequence of CpuSet, optional
        The PUs of each worker.
    allowed : CpuSet, optional
        NUMA nodes that the process may use (``Mems_allowed``); all if not given.
    policy : str
        As in :class:`hpcgpu.model.Settings`.

    Returns
    -------
    tuple of (str, CpuSet)
        ``none`` where there is one node only, or where the GPU's locality is unknown.

    """
    nodes = _usable_nodes(topology, allowed)
    everywhere = CpuSet(n.os_index for n in nodes)
    if policy == "none" or len(nodes) <= 1:
        return tuple(("none", everywhere if policy != "none" else CpuSet()) for _ in homes)
    if policy == "interleave":
        return tuple((policy, everywhere) for _ in homes)
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    shares: list[CpuSet] = [CpuSet()] * len(homes)
    for package in sorted(set(packages.values())):
        mine = [i for i, h in enumerate(homes) if h in packages and packages[h] == package]
        near = [n for n in nodes if n.package == package]
        cores = [cpusets[i] if cpusets else CpuSet() for i in mine]
        for i, share in zip(mine, _divide(near, [homes[i] for i in mine], cores), strict=True):
            shares[i] = share
    return tuple((policy, share) if share else ("none", CpuSet()) for share in shares)


def plan_memory_nodes_beside(
    topology: Topology, cpusets: Sequence[CpuSet], allowed: CpuSet | None = None, policy: str = "preferred-many"
) -> tuple[tuple[str, CpuSet], ...]:
    """Return memory policy and NUMA nodes of workers without a GPU: the nodes that their cores are on."""
    nodes = _usable_nodes(topology, allowed)
    if policy in ("none", "interleave") or len(nodes) <= 1:
        return plan_memory_nodes(topology, [None] * len(cpusets), cpusets, allowed, policy)
    shares = [CpuSet(n.os_index for n in nodes if n.cpuset & cpuset) for cpuset in cpusets]
    return tuple((policy, share) if share else ("none", CpuSet()) for share in shares)


def _usable_nodes(topology: Topology, allowed: CpuSet | None) -> list[NumaNode]:
    """Return the allowed NUMA nodes that have memory, by number."""
    known = any(n.memory_bytes for n in topology.numa_nodes)
    there = [n for n in topology.numa_nodes if n.memory_bytes or not known]
    return sorted((n for n in there if allowed is None or n.os_index in allowed), key=lambda n: n.os_index)


def _divide(nodes: Sequence[NumaNode], homes: Sequence[int | None], cpusets: Sequence[CpuSet]) -> list[CpuSet]:
    """Divide the NUMA nodes of one package over the workers that are at home on them."""
    shares: list[set[int]] = [{n.os_index for n in nodes if n.os_index == h} for h in homes]
    room = [sum(n.memory_bytes / homes.count(h) for n in nodes if n.os_index == h) for h in homes]
    for node in nodes if homes else ():
        if node.os_index in homes:
            continue
        users = [i for i, c in enumerate(cpusets) if c & node.cpuset]
        if not users:
            users = [min((room[i], abs((h or 0) - node.os_index), i) for i, h in enumerate(homes))[-1]]
        for i in users:
            shares[i].add(node.os_index)
            room[i] += (node.memory_bytes or 1) / len(users)
    # a home that the cgroup took away, and more workers than nodes: the package's other nodes are as near as can be
    return [CpuSet(s) if s else CpuSet(n.os_index for n in nodes) for s in shares]


def strict_room_bytes(topology: Topology, shares: Sequence[CpuSet]) -> tuple[int, ...]:
    """Return how much memory each worker finds on its own NUMA nodes; nodes that several have are divided."""
    users = {n.os_index: sum(n.os_index in s for s in shares) for n in topology.numa_nodes}
    return tuple(
        sum(n.memory_bytes // users[n.os_index] for n in topology.numa_nodes if n.os_index in s) for s in shares
    )


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
