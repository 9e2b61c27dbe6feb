"""A site's documented nodes: as a topology to plan for, and compared with a node as it is."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Site, Topology
from hpcgpu.model.site_facts import NodeType
from hpcgpu.units import format_bytes, parse_bytes

# Of memory as a document has it, the kernel keeps a part, and GB may be GiB there: 7 %.
_KERNEL_AND_UNITS = 0.15


def topology_of(node: NodeType) -> Topology:
    """Return the topology of a documented node; raise ConfigError if its GPUs' NUMA nodes are not documented."""
    # No document has all facts, so some are invented: one PU for each core, PCI addresses in the order of the GPUs'
    # numbers, equal memory on all NUMA nodes (64 GiB if undocumented), and the numbers of the GPUs' own memory.
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


def disagreements(topology: Topology, site: Site, queue: str | None) -> tuple[str, ...]:
    """Describe the differences between a node and its site's file: its ``queue``'s, or the most similar, type."""
    documented = site.node(queue)
    kinds = [documented] if documented else list(site.nodes.values())
    fabrics = {nic.kind for nic in topology.nics if nic.active and nic.kind != "ethernet"}
    network = [(f"its network is {site.network.kind}", " and ".join(sorted(fabrics)))]
    if not site.network.kind or not fabrics or site.network.kind in fabrics:
        network = []
    differences = [[*_of_node(topology, node), *network] for node in kinds]
    nearest = min(range(len(differences)), key=lambda i: len(differences[i]), default=None)
    if nearest is None:
        return ()
    citation = site.cited(kinds[nearest].source, *site.path_of(kinds[nearest]))
    return tuple(
        f"the site file of {site.name} says {theirs} ({citation}), this node has {ours}: hpcgpu uses the node's value; "
        "hpcgpu site show prints the file"
        for theirs, ours in differences[nearest]
    )


def _of_node(topology: Topology, node: NodeType) -> Iterator[tuple[str, str]]:
    gpus = [gpu for gpu in topology.gpus if gpu.can_run and not gpu.mig]
    if len(gpus) > node.gpus:  # fewer: a job may have a part of a node
        yield f"{node.gpus} GPUs", str(len(gpus))
    if node.numa_cores and len(topology.numa_nodes) != len(node.numa_cores):
        yield f"{len(node.numa_cores)} NUMA nodes", str(len(topology.numa_nodes))
    elif node.gpu_numa and len(gpus) == node.gpus:
        order = {numa.os_index: i for i, numa in enumerate(topology.numa_nodes)}  # documents count from 0
        homes = tuple(
            order.get(-1 if g.numa_node is None else g.numa_node, -1) for g in sorted(gpus, key=lambda g: g.pci)
        )
        if -1 not in homes and homes != node.gpu_numa:
            theirs, ours = (", ".join(map(str, nodes)) for nodes in (node.gpu_numa, homes))
            yield f"GPUs on the NUMA nodes {theirs}", f"them on {ours}"
    if node.cores is not None and len(topology.cores) != node.cores:
        yield f"{node.cores} cores", str(len(topology.cores))
    here = sum(numa.memory_bytes for numa in topology.numa_nodes)
    if node.memory is not None and here and abs(here / parse_bytes(node.memory) - 1) > _KERNEL_AND_UNITS:
        yield f"{format_bytes(parse_bytes(node.memory))} of memory", format_bytes(here)
