"""The hardware of one node, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgpu.model.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node with PUs and DRAM."""

    os_index: int
    cpuset: CpuSet
    memory_bytes: int
    package: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, identified by PCI address and UUID, never by an index.

    Attributes
    ----------
    pci : str
        ``0000:03:00.0``.
    uuid : str
        ``GPU-…``; empty when nobody told (a topology file without NVML).
    numa_node : int or None
        None: locality unknown.
    memory_bytes : int
        0: unknown.

    """

    pci: str
    uuid: str = ""
    model: str = ""
    vendor: str = "nvidia"
    numa_node: int | None = None
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of a network card, named as UCX names it (``mlx5_0`` port 1).

    Attributes
    ----------
    kind : str
        ``infiniband``, ``roce``, ``slingshot``, ``opa`` or ``ethernet``.
    interface : str
        The IP interface beside it (``ib0``, ``hsn1``); empty when there is none.

    """

    name: str
    pci: str
    port: int = 1
    kind: str = "infiniband"
    active: bool = True
    rate_gbps: float = 0.0
    numa_node: int | None = None
    interface: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """One node. ``hops`` holds (gpu pci, nic pci, PCI bridges between the two)."""

    numa_nodes: tuple[NumaNode, ...]
    cores: tuple[CpuSet, ...]
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    hops: tuple[tuple[str, str, int], ...] = ()
    source: str = ""
    warnings: tuple[str, ...] = ()
