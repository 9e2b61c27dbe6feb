"""Draft a site file from a machine's queues and nodes, with marks for unknown facts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from hpcgpu.model import Topology
from hpcgpu.model.site import Inventory
from hpcgpu.model.site_facts import NodeType

UNKNOWN = "# unknown:"
_PORTS = ("infiniband", "roce", "slingshot", "opa", "ethernet")
_MORE = (
    ("account", "is a job without one refused, and which variable has it; account: {needed: true, env: [...]}"),
    ("rules", "what must jobs say or not say; rules: [{require: walltime}, {forbid: --mem, why: ...}]"),
    ("network.ucx", "has UCX a transport for the network, and which interfaces are used"),
    ("launcher", "what starts ranks, if it is not found by itself; launcher: {command: [mpiexec]}"),
    ("scratch", "the fast local folder of the nodes; scratch: {path: $TMPDIR}"),
    ("modules", "must every job load some; modules: {load: [cuda]}"),
    ("login", "what happens to processes that compute on login nodes; login: {policy: ...}"),
    ("dashboard", "has the site a portal for web pages of nodes; dashboard: {url: 'https://.../{node}/{port}/'}"),
    ("charge", "what a job costs; charge: {unit: SU, per_gpu_hour: 1}"),
)


def render(inventory: Inventory, name: str, date: str, topology: Topology | None, match: Mapping[str, str]) -> str:
    """Return the YAML of a draft, which ``hpcgpu site check`` accepts."""
    # date is today, 2026-11-23; topology is this node's, None if unreadable; match has variables that name the machine,
    # with their values.
    out = ["version: 2", f"name: {name}", f"{UNKNOWN} title: the machine and the centre", f"batch: {inventory.batch}"]
    out += [f"{UNKNOWN} {text}" for text in inventory.silent]
    of = "sinfo and scontrol" if inventory.batch == "slurm" else "pbsnodes and qstat"
    out += ["sources:", f"  M: {_flow({'title': f'what {of} say on the machine', 'date': date})}"]
    if match:
        out.append(f"match: {_flow({'env': dict(match), 'source': 'M'})}")
    else:
        out.append(
            f"{UNKNOWN} match: a variable or host name that tells this machine from others; match: {{host: ...}}"
        )
    out += [*_dialect(inventory), *_queues(inventory), *_nodes(inventory, topology)]
    if inventory.default and any(queue.name == inventory.default for queue in inventory.queues):
        out.append(f"defaults: {_flow({'queue': inventory.default, 'source': 'M'})}")
    else:
        out.append(f"{UNKNOWN} defaults: the queue that is taken where queue= is not given; defaults: {{queue: ...}}")
    return "\n".join([*out, *(f"{UNKNOWN} {key}: {text}" for key, text in _MORE)]) + "\n"


def _dialect(inventory: Inventory) -> Iterator[str]:
    values = {"gpu_type": inventory.gpu_type, "array_limit": inventory.array_limit}
    if facts := {key: value for key, value in values.items() if value}:
        yield f"dialect: {_flow({**facts, 'source': 'M'})}"
    gpus = "gpus-per-node, gres, gpus or none" if inventory.batch == "slurm" else "ngpus, gpus or none"
    forms = f"GPUs, CPUs and memory asked for (gpus: {gpus}; memory: none; cpus: false)"
    yield f"{UNKNOWN} dialect: how the site wants {forms}"


def _queues(inventory: Inventory) -> Iterator[str]:
    if not inventory.queues:
        yield f"{UNKNOWN} queues: none with GPUs was seen; queues: [{{name: gpu, nodes: [1, 8], walltime: 24h}}]"
        return
    yield "queues:"
    for queue in inventory.queues:
        missing = [key for key in ("nodes", "walltime") if getattr(queue, key) is None]
        mark = f"  {UNKNOWN} {' and '.join(missing)}, or unlimited" if missing else ""
        yield f"  - {_flow({**_as_plain(queue), 'source': 'M'})}{mark}"


def _nodes(inventory: Inventory, topology: Topology | None) -> Iterator[str]:
    if not inventory.nodes:
        yield f"{UNKNOWN} nodes: none with GPUs was seen; nodes: {{gpu: {{gpus: 4, cpus: 64}}}}"
        return
    yield "nodes:"
    for name, node in inventory.nodes.items():
        places = _places(node, topology)
        yield f"  {name}: {_flow({**_as_plain(node), **places, 'source': 'M'})}"
        if not places:
            yield f"  {UNKNOWN} {name}.numa_cores, gpu_numa, ports: run hpcgpu site new on such a node, in a job"
    yield f"  {UNKNOWN} how much of the memory jobs may ask for, if it is less than job_memory"


def _places(node: NodeType, topology: Topology | None) -> dict[str, Any]:
    """Return the NUMA nodes of this node's GPUs and ports, if it is of that type."""
    gpus = sorted((gpu for gpu in (topology.gpus if topology else ()) if gpu.can_run), key=lambda gpu: gpu.pci)
    if topology is None or len(gpus) != node.gpus:
        return {}
    order = [numa.os_index for numa in topology.numa_nodes]
    homes = [gpu.numa_node for gpu in gpus]
    if not all(home in order for home in homes):
        return {}
    cores = [sum(bool(core & numa.cpuset) for core in topology.cores) for numa in topology.numa_nodes]
    ports = [
        {"name": nic.name, "kind": nic.kind} | ({"numa": order.index(nic.numa_node)} if nic.numa_node in order else {})
        for nic in topology.nics
        if nic.kind in _PORTS and nic.kind != "ethernet" and nic.active and not nic.virtual
    ]
    return {
        "cores": sum(cores),
        "numa_cores": cores,
        "packages": [numa.package for numa in topology.numa_nodes],
        "gpu_numa": [order.index(home) for home in homes if home is not None],
        **({"ports": ports} if ports else {}),
    }


def _as_plain(block: Any) -> dict[str, Any]:  # a block of the schema
    """Return a block's values that are not its defaults."""
    plain = asdict(block)
    defaults = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(block)}
    return {name: value for name, value in plain.items() if value != defaults[name]}


def _flow(value: object) -> str:
    """Return a value on one line; JSON's texts, lists and mappings are YAML's, too."""
    return json.dumps(value, ensure_ascii=False)
