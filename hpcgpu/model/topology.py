"""The hardware of one node, as plain data, and the binding of a worker to it.

They are named tuples, as those of :mod:`hpcgpu.model.allocation`: each rank of ``hpcgpu bind`` imports them.
"""

from __future__ import annotations

from hpcgpu.light_typing import NamedTuple
from hpcgpu.model.allocation import CpuSet


class NumaNode(NamedTuple):
    """A NUMA node."""

    os_index: int
    cpuset: CpuSet  # the local PUs; may be empty for memory that is not DRAM
    memory_bytes: int
    package: int = 0  # of these PUs
    kind: str = "dram"  # or hbm (Xeon Max, Knights Landing), gpu (POWER9, Grace Hopper), cxl, other


class Gpu(NamedTuple):
    """A GPU or a MIG slice, identified by PCI address and UUID, never by an index."""

    pci: str  # 0000:03:00.0; a slice has the address of its GPU
    uuid: str = ""  # GPU-…; "": unknown (a topology file without NVML)
    model: str = ""
    vendor: str = "nvidia"
    numa_node: int | None = None  # None: unknown
    memory_bytes: int = 0  # 0: unknown
    mig: str = ""  # profile of a slice (1g.10gb); "" for a whole GPU
    compute_mode: str = ""  # EXCLUSIVE_PROCESS: one process at a time, without MPS; PROHIBITED: none; "": any number
    numa_nodes: CpuSet = CpuSet()  # all, if it is local to several of a package; not compared

    @property
    def can_run(self) -> bool:
        """True for GPUs that run CUDA programs, and for simulated ones; a board's display chip may be AMD's."""
        return self.vendor in ("nvidia", "simulated")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gpu) and self[:-1] == other[:-1]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:-1])


class Nic(NamedTuple):
    """One port of a network card, named as UCX names it (``mlx5_0`` port 1)."""

    name: str
    pci: str
    port: int = 1
    kind: str = "infiniband"  # or roce, slingshot, opa, efa, usnic, rdma (of another maker), ethernet
    state: str = "active"  # or down, init or armed (no subnet manager yet), unknown (hwloc, for plain interfaces)
    rate_gbps: float = 0.0  # Gb/s; 0: unknown
    numa_node: int | None = None
    interface: str | None = ""  # IP interface (ib0, hsn1); "": none; None: unknown
    virtual: bool = False  # a virtual function (SR-IOV) of another card
    # PCI link of the card, GB/s; 0: unknown. Not compared: hwloc 1 does not tell it, and rounds it otherwise than /sys.
    link_gbytes_s: float = 0.0
    card: str = ""  # vendor and device number, 15b3:1021; "": unknown; not compared

    @property
    def active(self) -> bool:
        """False if the port is known not to carry data."""
        return self.state in ("active", "unknown")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nic) and self[:-2] == other[:-2]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:-2])


class Hop(NamedTuple):
    """The PCI path between a GPU and a NIC."""

    gpu: str  # PCI address
    nic: str  # PCI address
    bridges: int  # on the way between the two
    depth: int  # of the lowest bridge above both: 0 for the host bridge, 1 for a root port or a switch below it


class Topology(NamedTuple):
    """One node."""

    numa_nodes: tuple[NumaNode, ...]  # with DRAM; no PU is local to two; without PUs: the description leaves them out
    cores: tuple[CpuSet, ...]  # the PUs of each core
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    hops: tuple[Hop, ...] = ()  # pairs of GPU and NIC below one PCI host bridge
    source: str = ""  # origin of the description, for people
    warnings: tuple[str, ...] = ()
    other_memory: tuple[NumaNode, ...] = ()  # not for the heap of a worker
    name: str = ""  # product name of the machine
    l3: tuple[CpuSet, ...] = ()  # the PUs below each L3 cache; (): unknown
    core_kinds: tuple[CpuSet, ...] = ()  # the PUs of each kind of core: a hybrid CPU has fast and slow ones
    allowed: CpuSet | None = None  # PUs granted to the process that wrote the description; None: unknown
    allowed_nodes: CpuSet | None = None  # NUMA nodes likewise

    @property
    def gpu_memory_nodes(self) -> CpuSet:
        """NUMA nodes that are the GPUs' own memory."""
        return CpuSet(n.os_index for n in self.other_memory if n.kind == "gpu")


class Binding(NamedTuple):
    """Cores, memory, GPUs and NICs of one worker, before CUDA starts."""

    cpuset: CpuSet
    gpus: tuple[Gpu, ...]  # all whole GPUs that are visible, the worker's first; empty: a worker without a GPU
    nics: tuple[Nic, ...] = ()
    memory_policy: str = "none"  # preferred-many, bind, interleave or none
    memory_nodes: CpuSet = CpuSet()  # NUMA nodes of the policy
    interface: str = ""
    shared_cores: bool = False  # other workers of the node have the same cores: fewer cores than workers
    reasons: tuple[str, ...] = ()  # in words, for explain()
