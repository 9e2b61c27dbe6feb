"""Nodes of well-known machines as their sites' documents describe them, where no recording is at hand.

Documents tell GPUs' NUMA nodes and cores per NUMA node. Invented here: one PU for each core, 64 GiB on each NUMA
node, and PCI addresses, in the order of the GPUs' numbers. A port's NUMA node is None where the document names
the port but not its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    name = "hsn" if kind == "slingshot" else "mlx5_"
    nics = tuple(
        Nic(
            f"{name}{i}",
            f"0000:{128 + i:02x}:00.0",
            kind=kind,
            numa_node=home,
            interface=f"hsn{i}" if kind == "slingshot" else "",
        )
        for i, home in enumerate(homes)
    )
    return replace(topology, nics=nics)


def _grace_hopper(kind: str) -> Topology:
    """Four superchips of 72 cores, each a package. The GPU's own memory is a NUMA node too; its number is invented."""
    chips = _node([72] * 4, [0, 1, 2, 3], [0, 1, 2, 3])
    memory = tuple(NumaNode(4 + 8 * i, CpuSet(), 0, i, "gpu") for i in range(4))
    # The documents count four ports in a node and do not say where each is.
    return replace(_with_ports(chips, kind, [None] * 4), other_memory=memory)


DOCUMENTED: dict[str, Topology] = {
    # ALCF user guide, Polaris: GPUs 3,2,1,0 on the NUMA nodes of one EPYC. mlx5_0 is PHB to GPU 3 and mlx5_1 to
    # GPU 1; GPUs 0 and 2 are SYS to both. In doubt: the page says Slingshot 11, yet lists mlx5 devices, which are
    # taken as RoCE here.
    "polaris": _with_ports(_node([8] * 4, [3, 2, 1, 0], [0] * 4), "roce", [0, 2]),
    # NCSA Delta, architecture page: the nodes of 4 A100 and of 4 A40; one Slingshot port, next to GPU 3.
    "delta-a100x4": _with_ports(_node([16] * 4, [3, 2, 1, 0], [0] * 4), "slingshot", [0]),
    # Its port is SYS to all GPUs.
    "delta-a100x8": _with_ports(_node([16] * 8, [3, 3, 1, 1, 7, 7, 5, 5], [0] * 4 + [1] * 4), "slingshot", [None]),
    # Half of the NUMA nodes have no GPU. The place of its port is not told, so it has none here.
    "delta-h200x8": _node([24] * 4, [0] * 4 + [2] * 4, [0, 0, 1, 1]),
    # Jülich, JUWELS Booster overview: 4 HDR200 ports, whose places the page does not give.
    "juwels-booster": _with_ports(_node([6] * 8, [3, 1, 7, 5], [0] * 4 + [1] * 4), "infiniband", [None] * 4),
    # OLCF, Frontier user guide: eight GCDs; GPUs 4,5 | 2,3 | 6,7 | 0,1 on NUMA nodes 0 to 3; four Slingshot ports.
    "frontier": _with_ports(_node([16] * 4, [3, 3, 1, 1, 0, 0, 2, 2], [0] * 4, "amd"), "slingshot", [None] * 4),
    # LUMI user guide: the first cores for GPUs 0 to 7 are 49, 57, 17, 25, 1, 9, 33, 41.
    "lumi-g": _with_ports(_node([16] * 4, [3, 3, 1, 1, 0, 0, 2, 2], [0] * 4, "amd"), "slingshot", [None] * 4),
    # TACC, Lonestar6: three A100 on sockets 0, 1, 1. How many cores is not in the table used here: 16 stand for them.
    "lonestar6-a100": _node([16] * 2, [0, 1, 1], [0, 1]),
    # CSCS (Daint, Clariden), Jülich and CSC: each GPU is on its own superchip.
    "alps-gh200": _grace_hopper("slingshot"),
    "jupiter-gh200": _grace_hopper("infiniband"),
    "roihu-gh200": _grace_hopper("infiniband"),
}

# LUMI and Frontier leave 56 of 64 cores to jobs; that it is the first of each eight follows from LUMI's list.
_WITHOUT_FIRST = CpuSet(i for i in range(64) if i % 8)
GRANTED: dict[str, CpuSet] = {"frontier": _WITHOUT_FIRST, "lumi-g": _WITHOUT_FIRST}
LUMI_CORES = (49, 57, 17, 25, 1, 9, 33, 41)
