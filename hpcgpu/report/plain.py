"""A machine, its workers and their bindings as text and as plain data for JSON; where two such values differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcgpu.model import ActualBinding, Binding, CpuSet, Gpu, Nic, Topology, WorkerSpec
from hpcgpu.plan.binding.bindings import gpu_at
from hpcgpu.plan.binding.ports import DISTANCES, SPARE, Ports
from hpcgpu.units import format_bytes

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}


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
    kept = tuple(f"{name} is kept as you set it" for name in spec.kept_env)
    return (*spec.binding.reasons, *kept)


def describe(
    topology: Topology, specs: Sequence[WorkerSpec], host: str = "", nics: str | tuple[str, ...] = "balanced"
) -> dict[str, Any]:
    """Return the node, its workers and its ports, used or not, as ``hpcgpu topo --json`` prints them.

    ``host``: the name; "" if it is not this machine. ``nics``: the rule that chose the ports.
    """
    ports = Ports(topology, nics)
    return {
        "machine": _described(topology, host),
        "source": topology.source,
        "warnings": list(topology.warnings),
        "workers": [_worker(topology, ports, spec) for spec in specs],
        "nics": [_port(ports, nic, specs) for nic in ports.all],
    }


def _described(topology: Topology, host: str) -> dict[str, Any]:
    return {
        "host": host,
        "name": topology.name,
        "packages": len({n.package for n in topology.numa_nodes}),
        "cores": len(topology.cores),
        "pus": sum(len(c) for c in topology.cores),
        "numa_nodes": [
            {
                "index": n.os_index,
                "package": n.package,
                "kind": n.kind,
                "cpuset": str(n.cpuset),
                "memory_bytes": n.memory_bytes,
            }
            for n in (*topology.numa_nodes, *topology.other_memory)
        ],
        "gpus": [_gpu(g) for g in topology.gpus],
    }


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


def _port(ports: Ports, nic: Nic, specs: Sequence[WorkerSpec]) -> dict[str, Any]:
    users = [s.name for s in specs if nic in s.binding.nics]
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
            f"{n['pci']} port {n['port']}": {name: n[name] for name in ("name", "state", "kind", "numa_node")}
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
