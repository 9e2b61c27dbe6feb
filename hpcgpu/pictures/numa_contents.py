"""The contents of a node's picture: NUMA nodes, and the workers of each core, GPU and port."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcgpu.model import Binding, CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.plan.binding.ports import DISTANCE_WORDS, Ports
from hpcgpu.report.plain import MAKERS, port_name
from hpcgpu.units import counted, format_bytes

_PREFIXES = ("NVIDIA ", "Tesla ", "GeForce ", "AMD ", "Instinct ", "Intel(R) ", "Data Center GPU ")


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

    def contents_of(self, numa: int | None) -> NumaContents:
        """Return the parts of the NUMA node with this OS index; None: the parts without a known one."""
        homes = {n.os_index for n in self.topology.numa_nodes}
        packages = {n.package for n in self.topology.numa_nodes}
        return NumaContents(
            tuple(c for c in self.cores if self.home(c) == numa),
            tuple(g for g in self.gpus if (g.numa_node if g.numa_node in homes else None) == numa),
            tuple(n for n in self.topology.nics if (n.numa_node if n.numa_node in homes else None) == numa),
            tuple(
                m
                for m in self.topology.other_memory
                if self.home(m.cpuset) == numa and (numa is not None or m.package not in packages)
            ),
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
    """Return the model without its maker's name, and the profile of a MIG slice."""
    model = gpu.model
    for prefix in _PREFIXES:
        model = model.removeprefix(prefix)
    return " ".join(filter(None, (model or MAKERS.get(gpu.vendor, gpu.vendor), f"MIG {gpu.mig}" if gpu.mig else "")))


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
    where = (
        f", node{'s' if len(binding.memory_nodes) > 1 else ''} {binding.memory_nodes}" if binding.memory_nodes else ""
    )
    memory = "not bound" if binding.memory_policy == "none" else binding.memory_policy + where
    shared = ", shared" if binding.shared_cores else ""
    ports = [
        port_name(n) + (f" ({binding.interface})" if binding.interface not in ("", n.name) else "")
        for n in binding.nics
    ]
    if gpu and binding.nics:
        ports.append(DISTANCE_WORDS[Ports(node.topology).distance(gpu, binding.nics[0]).kind])
    return (
        node.names[worker],
        f"{gpu_name(gpu)}, {gpu.pci}" if gpu else "-",
        f"{count}{shared}: PUs {binding.cpuset}",
        memory,
        ", ".join(ports) or "-",
    )
