"""The memory of one worker: the NUMA nodes of its pages, and its limit of host memory."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.errors import ConfigError
from hpcgpu.model import Allocation, CpuSet, HostMemory, NumaNode, RunDocument, Settings, Topology
from hpcgpu.model.allocation import ALL_OF_THE_NODE
from hpcgpu.model.limit import NODE_MEMORY, Limit
from hpcgpu.units import format_bytes


def plan_memory_nodes(
    topology: Topology,
    homes: Sequence[int | None],
    cpusets: Sequence[CpuSet] = (),
    allowed: CpuSet | None = None,
    policy: str = "preferred-many",
    *,
    divide_all: bool = True,
) -> tuple[tuple[str, CpuSet], ...]:
    """Return memory policy and NUMA nodes of each worker.

    The NUMA nodes of a package are divided among its workers. Each worker has its home, the node of its GPU. A node
    without a GPU goes to the workers with cores there, else to the worker with the least memory so far. On machines
    with several NUMA nodes per package, half of the memory is on nodes without a GPU (all 6 recorded types), and a
    worker that spills needs its share. ``preferred-many`` is a preference: if these nodes are full, the kernel takes
    others.

    Parameters
    ----------
    topology : Topology
        The node.
    homes : sequence of int or None
        NUMA node of each worker's GPU; None: unknown.
    cpusets : sequence of CpuSet, optional
        The PUs of each worker.
    allowed : CpuSet, optional
        NUMA nodes that the process may use (``Mems_allowed``); default: all.
    policy : str
        As in :class:`hpcgpu.model.Settings`.
    divide_all : bool
        Divide the NUMA nodes without a GPU and without a worker's cores, too; False if the rule for cores leaves
        them out.

    Returns
    -------
    tuple of (str, CpuSet)
        The policy is ``none`` if there is only one NUMA node, or if the GPU's locality is unknown.

    """
    nodes = _usable_nodes(topology, allowed)
    everywhere = CpuSet(n.os_index for n in nodes)
    if policy == "none" or len(nodes) <= 1:
        return tuple(("none", everywhere if policy != "none" else CpuSet()) for _ in homes)
    if policy == "interleave":
        return tuple((policy, everywhere) for _ in homes)
    if not divide_all:
        nodes = [n for n in nodes if n.os_index in homes or any(n.cpuset & c for c in cpusets)]
    shares = _shares(topology, nodes, homes, cpusets or [CpuSet()] * len(homes))
    return tuple((policy, share) if share else ("none", CpuSet()) for share in shares)


def _shares(
    topology: Topology, nodes: Sequence[NumaNode], homes: Sequence[int | None], cpusets: Sequence[CpuSet]
) -> list[CpuSet]:
    """Return which of these NUMA nodes each worker has; they are of its own package."""
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    shares: list[CpuSet] = [CpuSet()] * len(homes)
    for package in sorted(set(packages.values())):
        mine = [i for i, h in enumerate(homes) if h in packages and packages[h] == package]
        near = [n for n in nodes if n.package == package]
        found = _divide(near, [homes[i] for i in mine], [cpusets[i] for i in mine])
        for i, share in zip(mine, found, strict=True):
            shares[i] = share
    return shares


def plan_memory_nodes_of_cpu_workers(
    topology: Topology, cpusets: Sequence[CpuSet], allowed: CpuSet | None = None, policy: str = "preferred-many"
) -> tuple[tuple[str, CpuSet], ...]:
    """Return memory policy and NUMA nodes of workers without a GPU: the nodes of their cores."""
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
    """Divide the NUMA nodes of one package among the workers that are at home on it."""
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
    # Some homes are not in the cgroup, or have no memory: then the package's other nodes are the nearest.
    return [CpuSet(s) if s else CpuSet(n.os_index for n in nodes) for s in shares]


def strict_room_bytes(topology: Topology, shares: Sequence[CpuSet]) -> tuple[int, ...]:
    """Return how much memory each worker's NUMA nodes have for it; a node of several workers is divided."""
    users = {n.os_index: sum(n.os_index in s for s in shares) for n in topology.numa_nodes}
    return tuple(
        sum(n.memory_bytes // users[n.os_index] for n in topology.numa_nodes if n.os_index in s) for s in shares
    )


def plan_host_memory(granted: HostMemory, allocation: Allocation, run: RunDocument | None = None) -> HostMemory:
    """Return the host memory that the job may use on its node, and what limits it.

    On many sites no cgroup limits a job to the memory that it has asked for. A job that takes more harms the other
    jobs of its node.

    Parameters
    ----------
    granted : HostMemory
        The memory that the kernel lets the job use.
    allocation : Allocation
        The job. The answer of its batch system comes before the request.
    run : RunDocument, optional
        Its ``memory`` counts in a job that was submitted for the run, and in each job of PBS, which may not say it.
        A user's own allocation may have been made with another number.

    """
    said, settings = allocation.memory, run.settings if run else None
    ours = run is not None and (run.shape != "in-allocation" or allocation.batch == "pbs")
    if said is None and ours and allocation.batch != "local" and settings and settings.memory_bytes:
        asked = f"memory={format_bytes(settings.memory_bytes)} (set by {settings.where('memory')})"
        said = HostMemory(settings.memory_bytes, asked)
    return said if said and said.nbytes < granted.nbytes else granted


def is_memory_asked(allocation: Allocation, settings: Settings, shape: str) -> bool:
    """Tell whether to ask the batch system for the granted memory: PBS has no variable for it.

    A job that was submitted with ``memory`` knows it. Jobs of arrays do not ask: the number of questions must not grow
    with the number of jobs.
    """
    knows = shape == "gang" and settings.memory_bytes
    return allocation.batch == "pbs" and shape != "member" and not knows


def share_of(memory: HostMemory, workers: int, together: int) -> HostMemory:
    """Return the part of one leader's workers: each leader on a node knows only its own."""
    if workers >= together:
        return memory
    return HostMemory(memory.nbytes * workers // together, f"{workers} of {together} parts of {memory.source}")


def memory_reason(limit_bytes: int | None, memory: HostMemory, *, others: bool) -> str:
    """Return why a worker has its memory limit; empty if the job has the whole node.

    Parameters
    ----------
    limit_bytes : int or None
        The worker's limit; None if the job's memory is unknown.
    memory : HostMemory
        The job's memory on this node.
    others : bool
        Other jobs may run on the node: it has cores that are not this job's.

    """
    if limit_bytes is None:
        return f"no memory limit is known: {memory.source}"
    share = f"memory limit {format_bytes(limit_bytes)}: its share of {format_bytes(memory.nbytes)}, {memory.source}"
    if memory.source != ALL_OF_THE_NODE:
        return share if memory.source else ""
    return f"{share}, which other jobs may use, too: nothing limits this one (ask for memory=)" if others else ""


def plan_memory_limit_bytes(asked: Limit, memory: HostMemory, workers: int, simulated_bytes: int = 0) -> int | None:
    """Return the host memory of one worker; None is no limit.

    Parameters
    ----------
    asked : Limit
        The setting: a fraction of the node's memory for each worker, or bytes for each worker.
    memory : HostMemory
        The memory that the workers may use together.
    workers : int
        Workers on the node.
    simulated_bytes : int
        Memory of all simulated GPUs of the node. It is host memory that the workers cannot use.

    Raises
    ------
    ConfigError
        Simulated GPUs leave no memory, the limits of all workers exceed it, or the limit is a fraction of an unknown
        size.

    """
    room, why = memory.nbytes - simulated_bytes, f" ({memory.source})" if memory.source else ""
    if not asked:
        return None
    said = f"memory_limit={asked!r}"
    if not memory.known:
        return asked.bytes_of(0, said, NODE_MEMORY) or None
    if room <= 0:
        raise ConfigError(
            f"the simulated GPUs of this node have {format_bytes(simulated_bytes)} together, but this job may use "
            f"{format_bytes(memory.nbytes)} of host memory in all{why}: take fewer or smaller ones "
            "(gpus='sim:2x256MiB'), or ask for more memory"
        )
    limit = asked.bytes_of(room, said, NODE_MEMORY, workers)
    if limit * workers > room:
        raise ConfigError(
            f"{said} for each of {workers} workers is {format_bytes(limit * workers)}, but this job "
            f"may use {format_bytes(room)} on this node{why}: leave memory_limit out for equal shares, or ask for more"
        )
    return limit
