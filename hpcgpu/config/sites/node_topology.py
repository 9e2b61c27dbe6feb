"""The type of a node and its topology, each made from the other.

No document has all facts, so some are invented: one PU for each core, PCI addresses in the order of the GPUs' numbers,
equal memory on all NUMA nodes (64 GiB if undocumented), and the numbers of the GPUs' own memory.
"""

from __future__ import annotations

from typing import Any

from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.model.site import NodeType
from hpcgpu.units import parse_bytes

_PORTS = ("infiniband", "roce", "slingshot", "opa")


def topology_of(node: NodeType) -> Topology:
    """Return the topology of a documented node; raise ConfigError if its GPUs' NUMA nodes are not documented."""
    if not node.numa_cores or not node.gpu_numa:
        raise ConfigError("the NUMA nodes of the GPUs are not documented (numa_cores and gpu_numa)")
    starts = [sum(node.numa_cores[:i]) for i in range(len(node.numa_cores) + 1)]
    each = parse_bytes(node.memory) // len(node.numa_cores) if node.memory is not None else 64 << 30
    packages = node.packages or (0,) * len(node.numa_cores)
    numa = tuple(
        NumaNode(i, CpuSet(range(starts[i], starts[i + 1])), each, package) for i, package in enumerate(packages)
    )
    gpu_memory = tuple(
        NumaNode(len(numa) + 8 * i, CpuSet(), 0, packages[home], "gpu")
        for i, home in enumerate(node.gpu_numa)
        if node.gpu_memory_nodes
    )
    return Topology(
        numa,
        tuple(CpuSet([i]) for i in range(starts[-1])),
        tuple(Gpu(f"0000:{16 + i:02x}:00.0", model=node.gpu, numa_node=home) for i, home in enumerate(node.gpu_numa)),
        tuple(
            Nic(
                port.name,
                f"0000:{128 + i:02x}:00.0",
                kind=port.kind,
                numa_node=port.numa,
                interface=port.name if port.kind == "slingshot" else "",
            )
            for i, port in enumerate(node.ports)
        ),
        source="documented",
        other_memory=gpu_memory,
    )


def places_of(node: NodeType, topology: Topology | None) -> dict[str, Any]:
    """Return the NUMA nodes of this node's GPUs and ports, if it is of that type."""
    gpus = sorted((gpu for gpu in (topology.gpus if topology else ()) if gpu.can_run), key=lambda gpu: gpu.pci)
    if topology is None or len(gpus) != node.gpus:
        return {}
    order = [numa.os_index for numa in topology.numa_nodes]
    homes = [gpu.numa_node for gpu in gpus]
    if not all(home in order for home in homes):
        return {}
    cores = [sum(bool(core & numa.cpuset) for core in topology.cores) for numa in topology.numa_nodes]
    ports = [
        {"name": nic.name, "kind": nic.kind} | ({"numa": order.index(nic.numa_node)} if nic.numa_node in order else {})
        for nic in topology.nics
        if nic.kind in _PORTS and nic.active and not nic.virtual
    ]
    return {
        "cores": sum(cores),
        "numa_cores": cores,
        "packages": [numa.package for numa in topology.numa_nodes],
        "gpu_numa": [order.index(home) for home in homes if home is not None],
        **({"ports": ports} if ports else {}),
    }
