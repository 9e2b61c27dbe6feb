"""The hardware of one node, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgpu.model.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node.

    Attributes
    ----------
    cpuset : CpuSet
        The PUs next to it; may be empty for memory that is no DRAM.
    package : int
        The package of these PUs.
    kind : str
        ``dram``; ``hbm`` beside DRAM (Xeon Max, Knights Landing), ``gpu`` for a GPU's own memory
        (POWER9, Grace Hopper), ``cxl``, or ``other``.

    """

    os_index: int
    cpuset: CpuSet
    memory_bytes: int
    package: int = 0
    kind: str = "dram"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or a MIG slice of one, identified by PCI address and UUID, never by an index.

    Attributes
    ----------
    pci : str
        ``0000:03:00.0``; a slice has its GPU's.
    uuid : str
        ``GPU-…``; empty when nobody told (a topology file without NVML).
    numa_node : int or None
        None: locality unknown.
    memory_bytes : int
        0: unknown.
    mig : str
        Name of a slice's profile (``1g.10gb``); empty for a whole GPU.

    """

    pci: str
    uuid: str = ""
    model: str = ""
    vendor: str = "nvidia"
    numa_node: int | None = None
    memory_bytes: int = 0
    mig: str = ""

    @property
    def can_run(self) -> bool:
        """True for what CUDA programs run on, and for simulated GPUs; a board's display chip may be AMD's."""
        return self.vendor in ("nvidia", "simulated")


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of a network card, named as UCX names it (``mlx5_0`` port 1).

    Attributes
    ----------
    kind : str
        ``infiniband``, ``roce``, ``slingshot``, ``opa``, ``efa``, ``usnic`` or ``ethernet``.
    state : str
        ``active``, ``down``, ``init`` or ``armed`` (no subnet manager yet), or ``unknown`` where the source
        does not say (hwloc, for plain interfaces).
    rate_gbps : float
        0: unknown.
    virtual : bool
        True for a virtual function (SR-IOV) of another card.
    interface : str or None
        The IP interface beside it (``ib0``, ``hsn1``); empty when there is none, None when the source does not say.

    """

    name: str
    pci: str
    port: int = 1
    kind: str = "infiniband"
    state: str = "active"
    rate_gbps: float = 0.0
    numa_node: int | None = None
    interface: str | None = ""
    virtual: bool = False

    @property
    def active(self) -> bool:
        """False when the port is known not to carry data."""
        return self.state in ("active", "unknown")


@dataclass(frozen=True, slots=True)
class Topology:
    """One node.

    Attributes
    ----------
    numa_nodes : tuple of NumaNode
        Those with DRAM, where workers' pages are planned. No PU is next to two of them; one whose PUs were left out
        of a description has none.
    cores : tuple of CpuSet
        The PUs of each core.
    hops : tuple of (str, str, int)
        PCI addresses of GPU and NIC, and the PCI bridges between the two.
    source : str
        Who described the node, for people.
    other_memory : tuple of NumaNode
        Memory that is no place for a worker's heap.
    name : str
        The machine's product name.
    l3 : tuple of CpuSet
        The PUs below each L3 cache; empty where nobody tells.
    allowed, allowed_nodes : CpuSet or None
        PUs and NUMA nodes that were granted to who described the node; None where nobody tells.

    """

    numa_nodes: tuple[NumaNode, ...]
    cores: tuple[CpuSet, ...]
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    hops: tuple[tuple[str, str, int], ...] = ()
    source: str = ""
    warnings: tuple[str, ...] = ()
    other_memory: tuple[NumaNode, ...] = ()
    name: str = ""
    l3: tuple[CpuSet, ...] = ()
    allowed: CpuSet | None = None
    allowed_nodes: CpuSet | None = None
