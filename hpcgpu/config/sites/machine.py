"""Site files and machines: which one this is, live facts in place of a file's, and a documented node as a topology."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import yaml

from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.model.site import Inventory, Path, Site
from hpcgpu.model.site_facts import Match, NodeType, Queue
from hpcgpu.units import parse_bytes, parse_duration_s

# A key at the top of a file, and all lines that belong to it.
_BLOCK = re.compile(r"^match:.*(?:\n(?:[ \t#].*|))*", re.MULTILINE)
_PROGRAMS = {"slurm": ("sinfo", "sinfo"), "pbs": ("qstat -Q", "pbsnodes")}  # of queues, of nodes


def looks_like(texts: Mapping[str, str], environ: Mapping[str, str], host: str) -> tuple[str, str] | None:
    """Return the only site whose file (``texts``, by name) matches this machine, and why; None for none or several."""
    # Only the match block of each file is read: 22 files take 3 CPU ms.
    matching = {name: why for name, text in texts.items() if (why := _why(text, environ, host))}
    return next(iter(matching.items())) if len(matching) == 1 else None


def is_here(match: Match, environ: Mapping[str, str], host: str) -> bool:
    """Return whether a site may be this machine: its file matches, or has no rule for it."""
    if not match.env and not match.host:
        return True
    by_name = bool(match.host) and re.fullmatch(match.host, host) is not None
    return by_name or any(environ.get(name) == value for name, value in match.env.items())


def _why(text: str, environ: Mapping[str, str], host: str) -> str:
    block = _match_of(text)
    env, pattern = block.get("env"), block.get("host")
    for name, value in (env or {}).items() if isinstance(env, dict) else ():
        if environ.get(str(name)) == str(value):
            return f"{name}={value}"
    try:
        return f"the host is {host}" if isinstance(pattern, str) and pattern and re.fullmatch(pattern, host) else ""
    except re.error:  # a user's file with a mistake, reported when it is used
        return ""


def _match_of(text: str) -> dict[str, Any]:
    match = _BLOCK.search(text)
    try:
        block = yaml.safe_load(match[0])["match"] if match else None
    except (yaml.YAMLError, KeyError, TypeError):
        return {}
    return block if isinstance(block, dict) else {}


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
