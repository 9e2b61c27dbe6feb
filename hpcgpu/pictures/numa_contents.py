"""The contents of a node's picture: NUMA nodes, and the workers of each core, GPU and port."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hpcgpu.model import Binding, CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.plan.binding.network import UNKNOWN, Ports
from hpcgpu.report.machine import MAKERS, port_name
from hpcgpu.units import counted, format_bytes


@dataclass(frozen=True, slots=True)
class NumaContents:
    """The parts of one NUMA node, or the parts without a known one."""

    cores: tuple[CpuSet, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    memories: tuple[NumaNode, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A topology and the bindings that are planned on it."""

    topology: Topology
    bindings: tuple[Binding, ...]
    names: tuple[str, ...]
    cores: tuple[CpuSet, ...]  # the topology's, and one for each planned PU without a core, as in the plan
    gpus: tuple[Gpu, ...]  # the topology's, and other (simulated) ones of the bindings, by PCI address

    def of_gpu(self, gpu: Gpu) -> tuple[int, ...]:
        """Return the workers whose own GPU this is."""
        return tuple(i for i, b in enumerate(self.bindings) if b.gpus and _same_gpu(b.gpus[0], gpu))

    def of_port(self, nic: Nic) -> tuple[int, ...]:
        """Return the workers that use this port."""
        used = (nic.name, nic.port)
        return tuple(i for i, b in enumerate(self.bindings) if used in [(n.name, n.port) for n in b.nics])

    def by_distance(self, nic: Nic) -> dict[int, list[int]]:
        """Return the workers that use this port by its distance from their GPU, the nearest first."""
        ports, out = Ports(self.topology), defaultdict[int, list[int]](list)
        for worker in self.of_port(nic):
            gpus = self.bindings[worker].gpus
            out[ports.distance(gpus[0], nic).kind if gpus else UNKNOWN].append(worker)
        return dict(sorted(out.items()))

    @property
    def title(self) -> str:
        """The machine's name, or its GPUs."""
        names = ", ".join(dict.fromkeys(map(gpu_name, self.gpus)))
        parts = f"{counted(len(self.gpus), 'GPU')}: {names}" if self.gpus else counted(len(self.cores), "core")
        return self.topology.name or f"Machine with {parts}"

    def contents_of(self, numa: int | None) -> NumaContents:
        """Return the parts of the NUMA node with this OS index; None: the parts without a known one."""
        homes = {n.os_index for n in self.topology.numa_nodes}
        others = {n.package for n in self.topology.numa_nodes} if numa is None else ()
        memories = (m for m in self.topology.other_memory if m.package not in others)
        return NumaContents(
            tuple(c for c in self.cores if self.home(c) == numa),
            tuple(g for g in self.gpus if (g.numa_node if g.numa_node in homes else None) == numa),
            tuple(n for n in self.topology.nics if (n.numa_node if n.numa_node in homes else None) == numa),
            tuple(m for m in memories if self.home(m.cpuset) == numa),
        )

    def home(self, pus: CpuSet) -> int | None:
        """Return the NUMA node with cores that has one of these PUs; None without one."""
        return next((n.os_index for n in self.topology.numa_nodes if n.cpuset & pus), None)

    def format_workers(self, workers: Sequence[int]) -> str:
        """Format workers by number and name."""
        named = [f"{i}" if self.names[i] == str(i) else f"{i} ({self.names[i]})" for i in workers]
        return f"worker{'s' if len(named) > 1 else ''} {', '.join(named)}" if named else "no worker"


def node_of(topology: Topology, bindings: Sequence[Binding], names: Sequence[str]) -> Node:
    """Return the node with its bindings; raise ValueError unless there is a name for each binding, or no name."""
    names = tuple(names) or tuple(str(i) for i in range(len(bindings)))
    if len(names) != len(bindings):
        raise ValueError(f"{len(names)} names for {len(bindings)} bindings; give one for each, or none")
    rest = CpuSet().union(*(b.cpuset for b in bindings)).difference(*topology.cores)
    gpus = list(topology.gpus)
    for gpu in (b.gpus[0] for b in bindings if b.gpus):
        if not any(_same_gpu(gpu, g) for g in gpus):
            gpus.append(gpu)
    return Node(
        topology,
        tuple(bindings),
        names,
        tuple(sorted([*topology.cores, *(CpuSet([i]) for i in rest)], key=min)),
        tuple(sorted(gpus, key=lambda g: (g.pci, g.uuid))),
    )


def _same_gpu(a: Gpu, b: Gpu) -> bool:
    return a.pci == b.pci and (a.uuid == b.uuid or (not (a.uuid and b.uuid) and a.mig == b.mig))


def gpu_name(gpu: Gpu) -> str:
    """Return the model, or the maker, and the profile of a MIG slice."""
    name = gpu.model or MAKERS.get(gpu.vendor, gpu.vendor)
    return f"{name} MIG {gpu.mig}" if gpu.mig else name


def gib(size_bytes: int) -> str:
    """Return a size in GiB; a simulated GPU may have less than one. 0 is an unknown size."""
    if size_bytes == 0:
        return "? GiB"
    return f"{size_bytes / 2**30:.0f} GiB" if size_bytes >= 2**30 else format_bytes(size_bytes)


def worker_cells(node: Node, worker: int) -> tuple[str, str, str, str, str]:
    """Return the worker's name, GPU, cores, memory policy and port."""
    binding = node.bindings[worker]
    gpu = binding.gpus[0] if binding.gpus else None
    count = counted(sum(bool(core & binding.cpuset) for core in node.cores), "core")
    nodes = binding.memory_nodes
    where = f", node{'s' if len(nodes) > 1 else ''} {nodes}" if nodes else ""
    memory = "not bound" if binding.memory_policy == "none" else binding.memory_policy + where
    shared = ", shared" if binding.shared_cores else ""
    ports = [
        port_name(n) + (f" ({binding.interface})" if binding.interface not in ("", n.name) else "")
        for n in binding.nics
    ]
    return (
        node.names[worker],
        f"GPU {next(i for i, g in enumerate(node.gpus) if _same_gpu(gpu, g))}, {gpu.pci}" if gpu else "-",
        f"{count}{shared}: PUs {binding.cpuset}",
        memory,
        ", ".join(ports) or "-",
    )
