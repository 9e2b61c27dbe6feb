"""A node and its workers as plain data for JSON, and the differences between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcgpu.model import Binding, CpuSet, Gpu, Nic, Topology, WorkerSpec
from hpcgpu.plan.binding.bindings import gpu_at
from hpcgpu.plan.binding.ports import DISTANCES, SPARE, Ports
from hpcgpu.plan.views.explain import worker_reasons

Described = Mapping[str, Any]


def describe(
    topology: Topology, specs: Sequence[WorkerSpec], host: str = "", nics: str | tuple[str, ...] = "balanced"
) -> dict[str, Any]:
    """Return the node, its workers and its ports, used or not, as ``hpcgpu topo --json`` prints them.

    ``host``: the name; "" if it is not this machine. ``nics``: the rule that chose the ports.
    """
    ports = Ports(topology, nics)
    return {
        "machine": _machine(topology, host),
        "source": topology.source,
        "warnings": list(topology.warnings),
        "workers": [_worker(topology, ports, spec) for spec in specs],
        "nics": [_port(ports, nic, specs) for nic in ports.all],
    }


def _machine(topology: Topology, host: str) -> dict[str, Any]:
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


def differences(nodes: Mapping[str, Described]) -> tuple[str, ...]:
    """Return the differences between the results of :func:`describe` in words, by the names of the nodes.

    Devices are compared by PCI address.
    """
    facts: dict[str, dict[str, list[str]]] = {}
    by_node = {name: dict(_facts(node)) for name, node in nodes.items()}
    for part in dict.fromkeys(part for parts in by_node.values() for part in parts):
        for name, parts in by_node.items():
            facts.setdefault(part, {}).setdefault(parts.get(part, "not there"), []).append(name)
    out = []
    for part, values in facts.items():
        if len(values) > 1:
            most_first = sorted(values.items(), key=lambda item: -len(item[1]))
            listed = (
                f"{value} on " + (", ".join(n) if len(n) <= 4 else f"{', '.join(n[:3])} and {len(n) - 3} more")
                for value, n in most_first
            )
            out.append(f"{part}: {'; '.join(listed)}")
    return tuple(out)


def _facts(node: Described) -> list[tuple[str, str]]:
    machine = node["machine"]
    out = [
        ("machine", str(machine["name"] or "name unknown")),
        ("cores", f"{machine['cores']} with {machine['pus']} PUs"),
    ]
    for n in machine["numa_nodes"]:
        # Memory sizes of equal nodes differ by the part that firmware has taken.
        out.append(
            (
                f"NUMA node {n['index']}",
                f"{n['kind']}, PUs {n['cpuset'] or 'none'}, {n['memory_bytes'] / 2**30:.0f} GiB",
            )
        )
    for g in machine["gpus"]:
        slice_of = f" {g['mig']}" if g["mig"] else ""
        out.append(
            (f"GPU at {g['pci']}{slice_of}", f"{g['model'] or g['vendor']} on NUMA node {_format_node(g['numa_node'])}")
        )
    for n in node["nics"]:
        at = f"port {n['port']} at {n['pci']}"
        out += [(f"{at}, name", n["name"]), (f"{at}, state", n["state"])]
        out.append((f"{at}, kind", f"{n['kind']} on NUMA node {_format_node(n['numa_node'])}"))
    return out


def _format_node(node: int | None) -> str:
    return "unknown" if node is None else str(node)
