"""Nodes of well-known machines as their sites' documents describe them, where no recording is at hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paths import ROOT

from hpcgpu.config.sites import topology_of
from hpcgpu.config.sites.read import read_site
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology


def _node(cores: Sequence[int], homes: Sequence[int], packages: Sequence[int], vendor: str = "nvidia") -> Topology:
    """``cores`` and ``packages`` are those of each NUMA node, ``homes`` the NUMA nodes of each GPU."""
    starts = [sum(cores[:i]) for i in range(len(cores) + 1)]
    numa = tuple(
        NumaNode(i, CpuSet(range(starts[i], starts[i + 1])), 64 * 2**30, package) for i, package in enumerate(packages)
    )
    gpus = tuple(Gpu(f"0000:{16 + i:02x}:00.0", vendor=vendor, numa_node=home) for i, home in enumerate(homes))
    return Topology(numa, tuple(CpuSet([i]) for i in range(starts[-1])), gpus, source="documented")


def _with_ports(topology: Topology, kind: str, homes: Sequence[int | None]) -> Topology:
    """Ports of ``kind`` on these NUMA nodes; Slingshot's are named by their interface, the others as mlx5_N."""
    hsn = kind == "slingshot"
    ports = ((f"{'hsn' if hsn else 'mlx5_'}{i}", f"0000:{128 + i:02x}:00.0", home) for i, home in enumerate(homes))
    nics = (Nic(name, pci, kind=kind, numa_node=home, interface=name if hsn else "") for name, pci, home in ports)
    return replace(topology, nics=tuple(nics))


def site_nodes() -> Iterator[tuple[str, Topology]]:
    """Yield the documented nodes of the site files: ``polaris-a100``."""
    for path in sorted((ROOT / "site_configs").glob("*.yaml")):
        for kind, node in read_site(path.read_text(), path.name).nodes.items():
            if node.gpu_numa:
                yield f"{path.stem}-{kind}", topology_of(node)


DOCUMENTED: dict[str, Topology] = {
    **dict(site_nodes()),
    # Machines without CUDA have no site file, and are planned for all the same.
    # OLCF, Frontier user guide: eight GCDs; GPUs 4,5 | 2,3 | 6,7 | 0,1 on NUMA nodes 0 to 3; four Slingshot ports.
    "frontier": _with_ports(_node([16] * 4, [3, 3, 1, 1, 0, 0, 2, 2], [0] * 4, "amd"), "slingshot", [None] * 4),
    # LUMI user guide: the first cores for GPUs 0 to 7 are 49, 57, 17, 25, 1, 9, 33, 41.
    "lumi-g": _with_ports(_node([16] * 4, [3, 3, 1, 1, 0, 0, 2, 2], [0] * 4, "amd"), "slingshot", [None] * 4),
}

# LUMI and Frontier leave 56 of 64 cores to jobs; that it is the first of each eight follows from LUMI's list.
_WITHOUT_FIRST = CpuSet(i for i in range(64) if i % 8)
GRANTED: dict[str, CpuSet] = {"frontier": _WITHOUT_FIRST, "lumi-g": _WITHOUT_FIRST}
LUMI_CORES = (49, 57, 17, 25, 1, 9, 33, 41)
