"""A machine and its planned workers as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcgpu.model import CpuSet, Gpu, Nic, Settings, Topology, WorkerSpec
from hpcgpu.plan.binding.bindings import gpu_at
from hpcgpu.plan.binding.cores import usable_cores
from hpcgpu.plan.binding.ports import DISTANCE_WORDS, FAR, Ports, Why, label, unused_ports
from hpcgpu.plan.binding.workers import NodeFacts
from hpcgpu.report import Column, Table
from hpcgpu.report.plain import describe, format_gpu, format_other_gpus, format_ports, worker_reasons
from hpcgpu.units import counted

_COLUMNS = (
    *(Column("worker", kind="name"), Column("GPU"), Column("NUMA", kind="name"), Column("cores: PUs")),
    *(Column("memory"), Column("port"), Column("reasons", kind="note")),
)


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """A machine and the workers planned on it."""

    facts: NodeFacts
    specs: tuple[WorkerSpec, ...]  # of the workers, those without a GPU last
    settings: Settings
    file: str = ""  # that describes the machine

    @property
    def ports(self) -> Ports:
        """The machine's network ports, by the rule that chose those of the workers."""
        return Ports(self.facts.topology, self.settings.nics)

    @property
    def table(self) -> Table:
        """The machine, its workers, unused parts, variables, and warnings."""
        source = f"read by {self.facts.topology.source}{f', from {self.file}' if self.file else ''}"
        title = [_machine(self), source, *_notes(self)]
        if not self.specs:
            again = f"hpcgpu topo --gpus sim:4{f' --from {self.file}' if self.file else ''}"
            title.append(f"no GPU here that workers run on; plan for some: {again}")
            return Table(_COLUMNS, (), "\n".join(title))
        workers = self.workers
        below = ("", *_idle(self), *_variables(self.specs), *(f"warning: {w}" for w in poor(self)))
        return Table(workers.columns, workers.rows, "\n".join((*title, "\n")), (*workers.notes, *below))

    @property
    def workers(self) -> Table:
        """The workers alone."""
        return workers_table(self.facts.topology, self.specs, self.settings.nics)

    def described(self) -> dict[str, Any]:
        """Return the plan as plain data, with the PUs that were planned with and the PUs of no worker."""
        allowed = self.facts.allowed
        idle = CpuSet(allowed.difference(*(s.binding.cpuset for s in self.specs)))
        plain = describe(self.facts.topology, self.specs, self.facts.name, self.settings.nics)
        return {**plain, "allowed_cpuset": str(allowed), "idle_cpuset": str(idle)}


def workers_table(topology: Topology, specs: Sequence[WorkerSpec], nics: str | tuple[str, ...] = "balanced") -> Table:
    """Show planned workers; a reason that all of them share is below the table."""
    ports = Ports(topology, nics)
    first, *others = [worker_reasons(s) for s in specs] or [()]
    alike = [r for r in first if others and all(r in reasons for reasons in others)]
    rows = [
        (*_cells(topology, ports, spec), tuple(r for r in worker_reasons(spec) if r not in alike)) for spec in specs
    ]
    return Table(_COLUMNS, rows, notes=[f"each worker: {reason}" for reason in alike])


def _cells(topology: Topology, ports: Ports, spec: WorkerSpec) -> tuple[str, ...]:
    binding, gpu = spec.binding, spec.gpu
    near = gpu or gpu_at(topology, binding.cpuset)
    cores = len(usable_cores(topology, binding.cpuset))
    shared = ", shared" if binding.shared_cores else ""
    port = format_ports(binding) if binding.nics or not binding.interface else f"interface {binding.interface}"
    node = "-" if gpu is None else "unknown" if gpu.numa_node is None else str(gpu.numa_node)
    memory = f"NUMA {binding.memory_nodes}, {binding.memory_policy}" if binding.memory_policy != "none" else "not bound"
    return (
        spec.name,
        format_gpu(gpu) if gpu else "none",
        node,
        f"{cores}{shared}: {binding.cpuset}",
        memory,
        ", ".join([port, *_of_port(ports, near, binding.nics)]),
    )


def _of_port(ports: Ports, gpu: Gpu, nics: Sequence[Nic]) -> Iterator[str]:
    """Yield distance and rate of the nearest port, and whether its state is unknown."""
    if not nics:
        return
    yield DISTANCE_WORDS[ports.distance(gpu, nics[0]).kind]
    yield f"{nics[0].rate_gbps:g} Gb/s" if nics[0].rate_gbps else "rate unknown"
    if nics[0].state == "unknown":
        yield "state unknown"


def _machine(plan: MachinePlan) -> str:
    topology = plan.facts.topology
    packages = len({n.package for n in topology.numa_nodes})
    ports = plan.ports
    real, simulated = sum(g.can_run for g in topology.gpus), len({s.gpu for s in plan.specs if s.simulated})
    counts = [
        *([counted(real, "GPU")] if real or not simulated else []),
        *([counted(simulated, "simulated GPU")] if simulated else []),
        f"{counted(len(topology.cores), 'core')} with {counted(sum(map(len, topology.cores)), 'PU')}",
        f"{counted(len(topology.numa_nodes), 'NUMA node')} on {counted(packages, 'package')}",
        f"{len(ports.usable)} of {counted(len(ports.all), 'port')} to use" if ports.all else "no network port",
    ]
    return (
        f"{', '.join(filter(None, (plan.facts.name, topology.name))) or 'machine without a name'}: {', '.join(counts)}"
    )


def _notes(plan: MachinePlan) -> Iterator[str]:
    topology = plan.facts.topology
    for warning in topology.warnings:
        yield f"note: {warning}"
    if others := format_other_gpus(topology):
        yield others
    everything = CpuSet(pu for core in topology.cores for pu in core)
    if plan.facts.allowed < everything:
        yield f"planned with PUs {plan.facts.allowed}, which are granted, of {everything}"
    nodes = CpuSet(n.os_index for n in topology.numa_nodes)
    if plan.facts.allowed_nodes and (granted := plan.facts.allowed_nodes & nodes) < nodes:
        yield f"planned with memory of NUMA nodes {granted}, which are granted, of {nodes}"


def _idle(plan: MachinePlan) -> Iterator[str]:
    """Yield the cores and ports that no worker has."""
    used = CpuSet().union(*(s.binding.cpuset for s in plan.specs))
    if free := usable_cores(plan.facts.topology, CpuSet(plan.facts.allowed - used)):
        why = f", with reserved_cores={plan.settings.reserved_cores}" if plan.settings.reserved_cores else ""
        yield f"no worker's: {counted(len(free), 'core')}, PUs {CpuSet(CpuSet().union(*free))}{why}"
    whys: dict[Why, list[str]] = {}
    for nic, reason in unused_ports(plan.ports, plan.specs):
        whys.setdefault(reason, []).append(label(nic))
    for reason, names in whys.items():
        yield f"not used: {', '.join(names)} ({reason.plural if len(names) > 1 else reason.singular})"


def _variables(specs: Sequence[WorkerSpec]) -> Iterator[str]:
    """Yield the variables of all workers, then those of each."""
    each = [dict(s.env) for s in specs]
    alike = {k: v for k, v in each[0].items() if all(env.get(k) == v for env in each)}
    if alike:
        yield f"set for each worker: {_assigned(alike)}"
    for spec, env in zip(specs, each, strict=True):
        if different := {k: v for k, v in env.items() if k not in alike}:
            yield f"set for {spec.name}: {_assigned(different)}"
    if any(s.gpu and not s.simulated and "CUDA_VISIBLE_DEVICES" not in {*dict(s.env), *s.kept_env} for s in specs):
        yield "CUDA_VISIBLE_DEVICES will be set, too, to the GPUs' UUIDs, which are not known here"


def _assigned(env: dict[str, str]) -> str:
    """Format variables; of a long list only the first element."""
    parts = []
    for name, value in sorted(env.items()):
        first, *more = value.split(",")
        shown = f"{first},(and {len(more)} more)" if len(value) > 60 and more else value
        parts.append(f"{name}={shown or repr('')}")
    return " ".join(parts)


def poor(plan: MachinePlan) -> Iterator[str]:
    """Yield the faults of a node's plan that people may not expect."""
    topology, on_gpus = plan.facts.topology, [s for s in plan.specs if s.gpu]
    several = len(on_gpus) > 1
    ports = plan.ports
    used = {n for s in on_gpus for n in s.binding.nics}
    if several and len(used) == 1 and all(s.binding.nics for s in on_gpus):
        (nic,) = used
        fabric = [n for n in ports.all if n.kind == nic.kind and n != nic]
        others = (
            f"; {', '.join(label(n) for n in fabric)} {'are' if len(fabric) > 1 else 'is'} not used" if fabric else ""
        )
        yield f"all {len(on_gpus)} workers on GPUs use one port, {label(nic)}{others}"
    far = [
        s.name for s in on_gpus if (g := s.gpu) and s.binding.nics and ports.distance(g, s.binding.nics[0]).kind == FAR
    ]
    if far and len(used) > 1:
        yield f"{_named(far, len(on_gpus))} a port on another package than the GPU"
    homes = {n.os_index: n.cpuset for n in topology.numa_nodes}
    lost = [
        s.name for s in on_gpus if (g := s.gpu) and g.numa_node in homes and not s.binding.cpuset & homes[g.numa_node]
    ]
    if lost:
        yield f"{_named(lost, len(on_gpus))} no core on the NUMA node of the GPU"
    if several and any(s.binding.shared_cores for s in plan.specs):
        yield f"all {len(plan.specs)} workers share their cores: there are fewer than workers"


def _named(names: Sequence[str], of: int) -> str:
    return f"{len(names)} of {of} workers on GPUs ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}) have"
