"""A machine and its planned workers as plain data for JSON, and where two such values differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcgpu.model import Binding, CpuSet, Gpu, Nic, Topology, WorkerSpec
from hpcgpu.plan.binding.bindings import gpu_at
from hpcgpu.plan.binding.ports import DISTANCES, SPARE, Ports
from hpcgpu.report.binding import worker_reasons


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
    return {
        "name": spec.name,
        "gpu": _gpu(gpu) if gpu else None,
        "cpuset": str(binding.cpuset),
        "shared_cores": binding.shared_cores,
        "memory": {"policy": binding.memory_policy, "nodes": _memory_nodes(binding, near.numa_node)},
        "nics": [{**_nic(n), "distance": DISTANCES[ports.distance(near, n).kind]} for n in binding.nics],
        "interface": binding.interface or None,
        "env": dict(spec.env),
        "reasons": list(worker_reasons(spec)),
    }


def _memory_nodes(binding: Binding, home: int | None) -> str:
    """Return the NUMA nodes of a worker's memory, the near one first; "" if the memory is not bound."""
    nodes = CpuSet() if binding.memory_policy == "none" else binding.memory_nodes
    if home not in nodes or len(nodes) == 1:
        return str(nodes)
    return f"{home},{CpuSet(nodes - {home})}"


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
