"""A machine, its workers and their bindings as a table, as text and as plain data; where two such values differ.

Together: a difference names the columns of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcgpu.errors import opt, plain
from hpcgpu.model import ActualBinding, Binding, CpuSet, Gpu, Nic, NumaNode, Settings, Topology, WorkerSpec
from hpcgpu.plan.binding.bindings import gpu_at
from hpcgpu.plan.binding.cores import usable_cores
from hpcgpu.plan.binding.network import DISTANCE_WORDS, DISTANCES, FAR, SPARE, Ports, Why, label
from hpcgpu.plan.binding.workers import NodeFacts
from hpcgpu.report.table import Column, Table
from hpcgpu.units import counted, format_bytes

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}
_COLUMNS = (
    *(Column("worker", kind="name"), Column("GPU"), Column("NUMA", kind="name"), Column("cores: PUs")),
    *(Column("memory"), Column("port"), Column("reasons", kind="note")),
)


def binding_differences(spec: WorkerSpec, actual: ActualBinding) -> tuple[str, ...]:
    """Return the differences between a process and its plan, for people; () without differences."""
    binding = spec.binding
    out = []
    wrong: dict[CpuSet, list[int]] = {}
    for thread, mask in actual.threads:
        if mask != binding.cpuset:
            wrong.setdefault(mask, []).append(thread)
    for mask, threads in wrong.items():
        out.append(
            f"{len(threads)} of {len(actual.threads)} threads may run on PUs {mask}, planned: {binding.cpuset} "
            f"(thread {threads[0]}{', …' if len(threads) > 1 else ''})"
        )
    if not actual.threads:
        out.append("no thread of the process could be read")
    planned = (binding.memory_policy, binding.memory_nodes)
    if binding.memory_policy != "none" and (actual.memory_policy, actual.memory_nodes) != planned:
        out.append(f"memory policy is {format_memory(actual)}, planned: {format_memory(binding)}")
    now = dict(actual.env)
    for name, value in spec.env:
        if now.get(name) != value:
            out.append(f"{name} is {now.get(name, 'not set')}, planned: {value}")
    return tuple(out)


def format_memory(binding: Binding | ActualBinding) -> str:
    """Return NUMA nodes and policy of a worker's memory."""
    policy = binding.memory_policy or "unknown"
    return f"{binding.memory_nodes} {policy}" if binding.memory_nodes and policy != "none" else policy


def port_name(nic: Nic) -> str:
    """Return the port as UCX names it, a plain interface as the kernel does."""
    return nic.name if nic.name == nic.interface else f"{nic.name}:{nic.port}"


def format_ports(binding: Binding) -> str:
    """Return the ports, as UCX names them, and the IP interface."""
    ports = [port_name(nic) for nic in binding.nics]
    if binding.interface not in ("", *(n.name for n in binding.nics)):
        ports.append(f"({binding.interface})")
    return " ".join(ports) or "-"


def format_gpu(gpu: Gpu, *, address: bool = True) -> str:
    """Return address, model, slice and size of a GPU; the maker if the model is unknown."""
    size = format_bytes(gpu.memory_bytes) if gpu.memory_bytes else ""
    part = gpu.mig if gpu.mig not in gpu.model else ""
    maker = MAKERS.get(gpu.vendor, gpu.vendor)
    # NVIDIA's model names of older GPUs lack its name ("Tesla V100-SXM2-16GB").
    has_maker = gpu.model and (gpu.vendor == "nvidia" or maker.lower() in gpu.model.lower())
    named = gpu.model if has_maker else f"{maker} {gpu.model}"
    return " ".join(filter(None, (gpu.pci if address else "", named.strip(), part, size)))


def format_other_gpus(topology: Topology) -> str:
    """Format the node's GPUs on which no worker can run; "" without such GPUs."""
    others = [f"{g.pci} {format_gpu(g, address=False)}" for g in topology.gpus if not g.can_run]
    return f"seen, not NVIDIA: no worker: {'; '.join(others)}" if others else ""


def worker_reasons(spec: WorkerSpec) -> tuple[str, ...]:
    """Return the faults of a worker's binding, and the variables that keep the user's values."""
    return (*spec.binding.reasons, *(f"{name} is kept as you set it" for name in spec.kept_env))


def describe(
    topology: Topology, specs: Sequence[WorkerSpec], host: str = "", nics: str | tuple[str, ...] = "balanced"
) -> dict[str, Any]:
    """Return the node, its workers and all ports, as ``hpcgpu topo --json`` prints them; host="": not this machine."""
    ports, users = Ports(topology, nics), dict[Nic, list[str]]()
    for spec in specs:
        for nic in spec.binding.nics:
            users.setdefault(nic, []).append(spec.name)
    return {
        "machine": {
            "host": host,
            "name": topology.name,
            "packages": len({n.package for n in topology.numa_nodes}),
            "cores": len(topology.cores),
            "pus": sum(len(c) for c in topology.cores),
            "numa_nodes": [_numa(n) for n in (*topology.numa_nodes, *topology.other_memory)],
            "gpus": [_gpu(g) for g in topology.gpus],
        },
        "source": topology.source,
        "warnings": list(topology.warnings),
        "workers": [_worker(topology, ports, spec) for spec in specs],
        "nics": [_port(ports, nic, users.get(nic, [])) for nic in ports.all],
    }


def _numa(node: NumaNode) -> dict[str, Any]:
    facts = {"index": node.os_index, "package": node.package, "kind": node.kind}
    return {**facts, "cpuset": str(node.cpuset), "memory_bytes": node.memory_bytes}


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "pci": gpu.pci,
        "uuid": gpu.uuid or None,
        "vendor": gpu.vendor,
        "model": gpu.model,
        "numa_node": gpu.numa_node,
        "memory_bytes": gpu.memory_bytes or None,
        "mig": gpu.mig or None,
    }


def _nic(nic: Nic) -> dict[str, Any]:
    return {"name": nic.name, "port": nic.port, "pci": nic.pci, "kind": nic.kind, "state": nic.state}


def _worker(topology: Topology, ports: Ports, spec: WorkerSpec) -> dict[str, Any]:
    binding, gpu = spec.binding, spec.gpu
    near = gpu or gpu_at(topology, binding.cpuset)
    nodes, home = CpuSet() if binding.memory_policy == "none" else binding.memory_nodes, near.numa_node
    near_first = f"{home},{CpuSet(nodes - {home})}" if home in nodes and len(nodes) > 1 else str(nodes)
    return {
        "name": spec.name,
        "gpu": _gpu(gpu) if gpu else None,
        "cpuset": str(binding.cpuset),
        "shared_cores": binding.shared_cores,
        "memory": {"policy": binding.memory_policy, "nodes": near_first},
        "nics": [{**_nic(n), "distance": DISTANCES[ports.distance(near, n).kind]} for n in binding.nics],
        "interface": binding.interface or None,
        "env": dict(spec.env),
        "reasons": list(worker_reasons(spec)),
    }


def _port(ports: Ports, nic: Nic, users: list[str]) -> dict[str, Any]:
    return {
        **_nic(nic),
        "rate_gbps": nic.rate_gbps or None,
        "numa_node": nic.numa_node,
        "interface": nic.interface or None,
        "virtual": nic.virtual,
        "workers": users,
        "why_not": None if users else ports.why_not.get(nic, SPARE).singular,
    }


def node_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return where the hardware of two results of :func:`describe` differs; devices are compared by PCI address."""
    return tuple(differences(_hardware(before), _hardware(after)))


def _hardware(node: Mapping[str, Any]) -> dict[str, Any]:
    machine = node["machine"]
    return {
        **{name: machine[name] for name in ("name", "cores", "pus")},
        # Memory sizes of equal nodes differ by the part that firmware has taken.
        "NUMA node": {
            str(n["index"]): {"kind": n["kind"], "PUs": n["cpuset"], "GiB": round(n["memory_bytes"] / 2**30)}
            for n in machine["numa_nodes"]
        },
        "GPU at": {
            f"{g['pci']} {g['mig'] or ''}".rstrip(): {"model": g["model"] or g["vendor"], "NUMA node": g["numa_node"]}
            for g in machine["gpus"]
        },
        "port at": {
            f"{n['pci'] or n['name']} port {n['port']}": {
                name: n[name] for name in ("name", "state", "kind", "numa_node")
            }
            for n in node["nics"]
        },
    }


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:  # JSON
    """Yield where two values of JSON differ, with the path to each place."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{path}[{i}]")
    elif before != after:
        old, new = ("nothing" if value in (None, [], {}) else str(value) for value in (before, after))
        yield f"{path}: {old} -> {new}"


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
    apart, alike = shared_reasons([worker_reasons(s) for s in specs])
    rows = [(*_cells(topology, ports, spec), mine) for spec, mine in zip(specs, apart, strict=True)]
    return Table(_COLUMNS, rows, notes=alike)


def shared_reasons(reasons: Sequence[Sequence[str]]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return each worker's reasons without those that all have, and these as notes below a table."""
    first, *others = reasons or [()]
    alike = [r for r in first if others and all(r in mine for mine in others)]
    return [tuple(r for r in mine if r not in alike) for mine in reasons], [f"each worker: {r}" for r in alike]


def _cells(topology: Topology, ports: Ports, spec: WorkerSpec) -> tuple[str, ...]:
    binding, gpu = spec.binding, spec.gpu
    near = gpu or gpu_at(topology, binding.cpuset)
    cores = len(usable_cores(topology, binding.cpuset))
    shared = ", shared" if binding.shared_cores else ""
    port = format_ports(binding) if binding.nics or not binding.interface else f"interface {binding.interface}"
    node = "-" if gpu is None else "unknown" if gpu.numa_node is None else str(gpu.numa_nodes or gpu.numa_node)
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
    gpus = [g for g in topology.gpus if g.can_run]
    granted = CpuSet(i for i, gpu in enumerate(gpus) if gpu in plan.facts.gpus)
    if granted and len(granted) < len(gpus) and not any(s.simulated for s in plan.specs):
        some = "GPUs {}, which are" if len(granted) > 1 else "GPU {}, which is"
        yield f"planned with {some.format(granted)} granted, of 0-{len(gpus) - 1}"
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
        why = (
            f", with {plain(opt('reserved_cores', plan.settings.reserved_cores))}"
            if plan.settings.reserved_cores
            else ""
        )
        yield f"no worker's: {counted(len(free), 'core')}, PUs {CpuSet(CpuSet().union(*free))}{why}"
    whys: dict[Why, list[str]] = {}
    used_ports = {nic for spec in plan.specs for nic in spec.binding.nics}
    ports = plan.ports
    for nic in (n for n in ports.all if n not in used_ports):
        whys.setdefault(ports.why_not.get(nic, SPARE), []).append(label(nic))
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
