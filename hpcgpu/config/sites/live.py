"""A site with its batch system's present queues and nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hpcgpu.model.site import Inventory, NodeType, Path, Queue, Site
from hpcgpu.units import parse_bytes, parse_duration_s

_PROGRAMS = {"slurm": ("sinfo", "sinfo"), "pbs": ("qstat -Q", "pbsnodes")}  # of queues, of nodes


def apply_live_facts(site: Site, inventory: Inventory) -> Site:
    """Return the site with live facts in place of its file's; facts that the file does not have are not added."""
    if site.dialect.get("queue") == "qos":  # sinfo lists partitions
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
