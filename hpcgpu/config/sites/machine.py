"""Site files and machines: which one this is, live facts, a documented node as a topology, a draft of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, replace
from types import MappingProxyType
from typing import Any

import yaml

from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.model.site import Inventory, Match, NodeType, Path, Queue, Site
from hpcgpu.units import parse_bytes, parse_duration_s

# A key at the top of a file, and all lines that belong to it.
_BLOCK = re.compile(r"^match:.*(?:\n(?:[ \t#].*|))*", re.MULTILINE)
_PROGRAMS = {"slurm": ("sinfo", "sinfo"), "pbs": ("qstat -Q", "pbsnodes")}  # of queues, of nodes


def looks_like(texts: Mapping[str, str], environ: Mapping[str, str], host: str) -> tuple[str, str] | None:
    """Return the only site whose file (``texts``, by name) matches this machine, and why; None for none or several."""
    # Only the match block of each file is read: 22 files take 3 CPU ms.
    matching = {name: why for name, text in texts.items() if (why := _why(_match_of(text), environ, host))}
    return next(iter(matching.items())) if len(matching) == 1 else None


def is_here(match: Match, environ: Mapping[str, str], host: str) -> bool:
    """Return whether a site may be this machine: its file matches, or has no rule for it."""
    if not match.env and not match.host:
        return True
    return bool(_why(match, environ, host))


def _why(match: Match, environ: Mapping[str, str], host: str) -> str:
    by_name = f"the host is {host}" if match.host and re.fullmatch(match.host, host) else ""
    return next((f"{name}={value}" for name, value in match.env.items() if environ.get(name) == value), by_name)


def _match_of(text: str) -> Match:
    try:
        block = yaml.safe_load(lines[0])["match"] if (lines := _BLOCK.search(text)) else {}
        return Match(env={str(k): str(v) for k, v in block.get("env", {}).items()}, host=str(block.get("host", "")))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ConfigError):
        return Match()  # a user's file with a mistake, reported when it is used


def hint(name: str, why: str) -> str:
    """Return the hint for people, printed once."""
    return (
        f"this looks like {name} ({why}): site={name!r} (or HPCGPU_SITE={name}) knows its queues, limits and nodes. "
        "Nothing is assumed without it, and this is said once; HPCGPU_SITE=none says that you want none"
    )


def apply_live_facts(site: Site, inventory: Inventory) -> Site:
    """Return the site with live facts in place of its file's."""
    # Facts that the file does not have are not added; queues that are a QOS are not compared: sinfo lists partitions.
    if site.dialect.get("queue") == "qos":
        return site
    live = {queue.name: queue for queue in inventory.queues}
    queues, nodes, origins = list(site.queues), dict(site.nodes), dict(site.origins)
    for i, queue in enumerate(site.queues):
        if (now := live.get(queue.name)) is None:
            continue
        changes: dict[Path, Any] = {("queues", i, key): value for key, value in _of_queue(queue, now)}
        if node := site.node(queue.name):
            path = site.path_of(node)
            changes |= {(*path, key): value for key, value in _of_node(node, now, inventory)}
        for path, value in changes.items():
            block, which, key = path
            if block == "queues":
                queues[i] = replace(queues[i], **{str(key): value})
            else:
                # the documented places of GPUs do not hold for another number of them
                more: dict[str, Any] = {"gpu_numa": ()} if key == "gpus" else {}
                nodes[str(which)] = replace(nodes[str(which)], **{str(key): value, **more})
            program = _PROGRAMS[inventory.batch][block == "nodes"]
            origins[path] = f"{program}, not {site.at(*path) or 'its file'}"
    return replace(site, queues=tuple(queues), nodes=nodes, origins=MappingProxyType(origins))


def _of_queue(queue: Queue, now: Queue) -> Iterator[tuple[str, Any]]:
    if queue.nodes and now.nodes and queue.nodes[1] != now.nodes[1]:
        yield "nodes", (min(queue.nodes[0], now.nodes[1]), now.nodes[1])
    limits = [limit for limit in (queue.walltime, *queue.walltime_by_nodes.values()) if limit is not None]
    longest = max((parse_duration_s(limit) for limit in limits), default=None)
    if now.walltime is None or longest is None or (limit := parse_duration_s(now.walltime)) == longest:
        return
    if not queue.walltime_by_nodes:
        yield "walltime", now.walltime
    elif limit < longest:  # more is a policy of the scheduler's, which the queue does not show
        steps = queue.walltime_by_nodes.items()
        yield "walltime_by_nodes", {nodes: min(each, now.walltime, key=parse_duration_s) for nodes, each in steps}


def _of_node(node: NodeType, now: Queue, inventory: Inventory) -> Iterator[tuple[str, Any]]:
    same = [kind for kind in inventory.nodes.values() if kind.gpus == node.gpus]
    live = inventory.nodes.get(now.node)
    if live and not same:
        yield "gpus", live.gpus
    elif live not in same:  # of several types with as many GPUs it is unknown which is meant
        live = same[0] if len(same) == 1 else None
    for key in ("cpus", "job_memory") if live else ():  # less than there is may be the site's rule; more cannot be
        documented, value = getattr(node, key), getattr(live, key)
        if documented is not None and value is not None and parse_bytes(documented) > parse_bytes(value):
            yield key, value


def topology_of(node: NodeType) -> Topology:
    """Return the topology of a documented node; raise ConfigError if its GPUs' NUMA nodes are not documented."""
    # No document has all facts, so some are invented: one PU for each core, PCI addresses in the order of the GPUs'
    # numbers, equal memory on all NUMA nodes (64 GiB if undocumented), and the numbers of the GPUs' own memory.
    if not node.numa_cores or not node.gpu_numa:
        raise ConfigError("the NUMA nodes of the GPUs are not documented (numa_cores and gpu_numa)")
    starts = [sum(node.numa_cores[:i]) for i in range(len(node.numa_cores) + 1)]
    each = parse_bytes(node.memory) // len(node.numa_cores) if node.memory is not None else 64 << 30
    packages = node.packages or (0,) * len(node.numa_cores)
    numa = tuple(
        NumaNode(i, CpuSet(range(starts[i], starts[i + 1])), each, package) for i, package in enumerate(packages)
    )
    gpu_memory = tuple(
        NumaNode(len(numa) + 8 * i, CpuSet(), 0, packages[home], "gpu")
        for i, home in enumerate(node.gpu_numa)
        if node.gpu_memory_nodes
    )
    return Topology(
        numa,
        tuple(CpuSet([i]) for i in range(starts[-1])),
        tuple(Gpu(f"0000:{16 + i:02x}:00.0", model=node.gpu, numa_node=home) for i, home in enumerate(node.gpu_numa)),
        tuple(
            Nic(
                port.name,
                f"0000:{128 + i:02x}:00.0",
                kind=port.kind,
                numa_node=port.numa,
                interface=port.name if port.kind == "slingshot" else "",
            )
            for i, port in enumerate(node.ports)
        ),
        source="documented",
        other_memory=gpu_memory,
    )


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


def render_draft(
    inventory: Inventory, name: str, date: str, topology: Topology | None, match: Mapping[str, str]
) -> str:
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
