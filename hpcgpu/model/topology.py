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
        The local PUs; may be empty for memory that is no DRAM.
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
        ``GPU-…``; empty: unknown (a topology file without NVML).
    numa_node : int or None
        None: locality unknown.
    memory_bytes : int
        0: unknown.
    mig : str
        Name of a slice's profile (``1g.10gb``); empty for a whole GPU.
    compute_mode : str
        ``EXCLUSIVE_PROCESS``: one process at a time, without MPS. ``PROHIBITED``: none. Empty: any number.

    """

    pci: str
    uuid: str = ""
    model: str = ""
    vendor: str = "nvidia"
    numa_node: int | None = None
    memory_bytes: int = 0
    mig: str = ""
    compute_mode: str = ""

    @property
    def can_run(self) -> bool:
        """True for GPUs that run CUDA programs, and for simulated ones; a board's display chip may be AMD's."""
        return self.vendor in ("nvidia", "simulated")


@dataclass(frozen=True, slots=True)
class Nic:
    """One port of a network card, named as UCX names it (``mlx5_0`` port 1).

    Attributes
    ----------
    kind : str
        ``infiniband``, ``roce``, ``slingshot``, ``opa``, ``efa``, ``usnic`` or ``ethernet``.
    state : str
        ``active``, ``down``, ``init`` or ``armed`` (no subnet manager yet), or ``unknown`` if the source does not
        tell (hwloc, for plain interfaces).
    rate_gbps : float
        0: unknown.
    virtual : bool
        True for a virtual function (SR-IOV) of another card.
    interface : str or None
        The IP interface of the port (``ib0``, ``hsn1``); empty: none; None: the source does not tell.

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
        """False if the port is known not to carry data."""
        return self.state in ("active", "unknown")


@dataclass(frozen=True, slots=True)
class Topology:
    """One node.

    Attributes
    ----------
    numa_nodes : tuple of NumaNode
        NUMA nodes with DRAM, on which workers' pages are planned. No PU is local to two of them. A node whose PUs a
        description leaves out has none.
    cores : tuple of CpuSet
        The PUs of each core.
    hops : tuple of (str, str, int)
        PCI addresses of GPU and NIC, and the number of PCI bridges between the two.
    source : str
        The origin of the description, for people.
    other_memory : tuple of NumaNode
        Memory that is not for a worker's heap.
    name : str
        The machine's product name.
    l3 : tuple of CpuSet
        The PUs below each L3 cache; empty: unknown.
    allowed, allowed_nodes : CpuSet or None
        PUs and NUMA nodes that were granted to the process that described the node; None: unknown.

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
