"""The memory nodes of each worker."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import NumaNode, Topology


def plan_memory_nodes(
    topology: Topology,
    homes: Sequence[int | None],
    cpusets: Sequence[CpuSet] = (),
    allowed: CpuSet | None = None,
    policy: str = "preferred-many",
    *,
    divide_all: bool = True,
) -> tuple[tuple[str, CpuSet], ...]:
    """Plan each worker's memory policy and NUMA nodes; mostly ``none`` for one node or a GPU of unknown locality.

    ``homes`` are the NUMA nodes of the workers' GPUs (None: unknown), ``cpusets`` the workers' PUs; those after
    ``homes`` are of workers without a GPU, which have the nodes of their cores. ``allowed`` are the NUMA nodes of the
    process (None: all). The ``policy`` preferred-many is a preference: if these nodes are full, the kernel uses others.

    The NUMA nodes of a package are divided among its workers: each has its home; a node without a GPU goes to the
    workers with cores there, else (not without ``divide_all``) to the worker with the least memory so far. On machines
    with several NUMA nodes per package, half of the memory is on nodes without a GPU (all 6 recorded types), and a
    worker that spills needs its share.
    """
    nodes = _usable_nodes(topology, allowed)
    everywhere = CpuSet(n.os_index for n in nodes)
    # Where a GPU's or other memory is a NUMA node too, only a strict policy keeps pages off it (Grace Hopper).
    if policy == "bind" and len(nodes) == 1 and topology.other_memory:
        return (("bind", everywhere),) * len(cpusets or homes)
    if policy == "none" or len(nodes) <= 1:
        return (("none", everywhere if policy != "none" else CpuSet()),) * len(cpusets or homes)
    if policy == "interleave":
        return ((policy, everywhere),) * len(cpusets or homes)
    near, others = cpusets[: len(homes)], cpusets[len(homes) :]
    divided = [n for n in nodes if divide_all or n.os_index in homes or any(n.cpuset & c for c in near)]
    shares = _shares(topology, divided, homes, near or [CpuSet()] * len(homes))
    shares += [CpuSet(n.os_index for n in nodes if n.cpuset & c) for c in others]
    return tuple((policy, share) if share else ("none", CpuSet()) for share in shares)


def _shares(
    topology: Topology, nodes: Sequence[NumaNode], homes: Sequence[int | None], cpusets: Sequence[CpuSet]
) -> list[CpuSet]:
    """Return which of these NUMA nodes each worker has; they are of its own package."""
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    shares = [{n.os_index for n in nodes if n.os_index == h} for h in homes]
    room = [sum(n.memory_bytes / homes.count(h) for n in nodes if n.os_index == h) for h in homes]
    for node in nodes:
        mine = [i for i, h in enumerate(homes) if h in packages and packages[h] == node.package]
        if node.os_index in homes or not mine:
            continue
        users = [i for i in mine if cpusets[i] & node.cpuset]
        if not users:
            users = [min((room[i], abs((homes[i] or 0) - node.os_index), i) for i in mine)[-1]]
        for i in users:
            shares[i].add(node.os_index)
            room[i] += (node.memory_bytes or 1) / len(users)
    # Some homes are not in the cgroup, or have no memory: then the package's other nodes are the nearest.
    near = [[n.os_index for n in nodes if h in packages and packages[h] == n.package] for h in homes]
    return [CpuSet(share or others) for share, others in zip(shares, near, strict=True)]


def _usable_nodes(topology: Topology, allowed: CpuSet | None) -> list[NumaNode]:
    """Return the allowed NUMA nodes that have memory, by number."""
    has_sizes = any(n.memory_bytes for n in topology.numa_nodes)
    nodes = [n for n in topology.numa_nodes if n.memory_bytes or not has_sizes]
    return sorted((n for n in nodes if allowed is None or n.os_index in allowed), key=lambda n: n.os_index)
