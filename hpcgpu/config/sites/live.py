"""Compare a site's file with its batch system's answers: live facts win, and people get messages on both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hpcgpu.config.sites.limits import beyond
from hpcgpu.model import Settings
from hpcgpu.model.inventory import Inventory
from hpcgpu.model.site import Path, Site
from hpcgpu.model.site_facts import NodeType, Queue
from hpcgpu.units import format_bytes, format_duration, parse_bytes, parse_duration_s

_PROGRAMS = {"slurm": ("sinfo", "sinfo"), "pbs": ("qstat -Q", "pbsnodes")}  # of queues, of nodes


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that differs between the file and the machine."""

    queue: str  # whose jobs it concerns
    path: Path  # to the value in the file
    message: str  # both values, each with its source
    # the file's limit is lower than the queue's; it may be an account's or a QOS's, which queues do not show
    is_limit: bool
    value: Any  # the live one


def apply_live_facts(site: Site, inventory: Inventory) -> tuple[Site, tuple[Difference, ...]]:
    """Return the site with live facts in place of its file's, and the differences."""
    # Facts that the file does not have are not added; queues that are a QOS are not compared: sinfo lists partitions.
    if site.dialect.get("queue") == "qos":
        return site, ()
    live = {queue.name: queue for queue in inventory.queues}
    pairs = [(queue, live[queue.name]) for queue in site.queues if queue.name in live]
    differing = tuple(
        difference
        for queue, now in pairs
        for difference in (*_of_queue(site, queue, now), *_of_node(site, queue, now, inventory))
    )
    return _with(site, {d.path: d for d in differing}, inventory.batch), differing


def format_differences(differing: tuple[Difference, ...], settings: Settings, site: Site) -> Iterator[str]:
    """Yield messages for a queue's user: missing resources, and limits of the file's ``site`` that the job exceeds."""
    above = settings.site_limits and any(beyond(settings, site))
    for difference in differing:
        if difference.queue == settings.queue and (above or not difference.is_limit):
            yield difference.message


def _of_queue(site: Site, queue: Queue, now: Queue) -> Iterator[Difference]:
    path = site.path_of(queue)
    if queue.nodes and now.nodes and queue.nodes[1] != now.nodes[1]:
        most = now.nodes[1]
        text = f"queue {queue.name} takes {queue.nodes[1]} nodes at most"
        value = (min(queue.nodes[0], most), most)
        yield _difference(site, queue, (*path, "nodes"), text, str(most), value, is_limit=most > queue.nodes[1])
    limits = [limit for limit in (queue.walltime, *queue.walltime_by_nodes.values()) if limit is not None]
    longest = max((parse_duration_s(limit) for limit in limits), default=None)
    if now.walltime is None or longest is None or (limit := parse_duration_s(now.walltime)) == longest:
        return
    if queue.walltime_by_nodes and limit > longest:  # a policy of the scheduler's, which the queue does not show
        return
    key = "walltime_by_nodes" if queue.walltime_by_nodes else "walltime"
    steps = queue.walltime_by_nodes.items()
    shorter = {nodes: min(each, now.walltime, key=parse_duration_s) for nodes, each in steps}
    text = f"jobs in queue {queue.name} have {format_duration(longest)} at most"
    ours, value_now = format_duration(limit), shorter or now.walltime
    yield _difference(site, queue, (*path, key), text, ours, value_now, is_limit=limit > longest)


def _of_node(site: Site, queue: Queue, now: Queue, inventory: Inventory) -> Iterator[Difference]:
    node = site.node(queue.name)
    if node is None:
        return
    path, same = site.path_of(node), [kind for kind in inventory.nodes.values() if kind.gpus == node.gpus]
    live = inventory.nodes.get(now.node)
    if live and not same:
        text = f"nodes of queue {queue.name} have {node.gpus} GPUs"
        yield _difference(site, queue, (*path, "gpus"), text, str(live.gpus), live.gpus)
    elif live not in same:  # of several types with as many GPUs it is unknown which is meant
        live = same[0] if len(same) == 1 else None
    if live is None:
        return
    for key in ("cpus", "job_memory"):  # less than there is may be the site's rule; more cannot be
        theirs, ours = _number(node, key), _number(live, key)
        if theirs is not None and ours is not None and theirs > ours:
            file_value, value = (format_bytes(theirs), format_bytes(ours)) if key == "job_memory" else (theirs, ours)
            text = f"jobs may ask for {file_value} {'of memory' if key == 'job_memory' else 'CPUs'} of such a node"
            yield _difference(site, queue, (*path, key), text, str(value), getattr(live, key))


def _number(node: NodeType, key: str) -> int | None:
    value = getattr(node, key)
    return None if value is None else parse_bytes(value)


def _difference(
    site: Site, queue: Queue, path: Path, theirs: str, ours: str, value: object, *, is_limit: bool = False
) -> Difference:
    of_nodes = path[0] == "nodes"
    source = site.nodes[str(path[1])].source if of_nodes else queue.source
    program = _PROGRAMS[site.batch][of_nodes]
    message = (
        f"the site file of {site.name} says: {theirs} ({site.cited(source, *path)}), {program} says {ours}: hpcgpu "
        f"uses the value of {program}; hpcgpu site show prints the file"
    )
    return Difference(queue.name, path, message, is_limit, value)


def _with(site: Site, changes: Mapping[Path, Difference], batch: str) -> Site:
    """Return the site with other values, each with its program as origin."""
    queues, nodes, origins = list(site.queues), dict(site.nodes), dict(site.origins)
    for path, difference in changes.items():
        block, which, key = path
        if block == "queues":
            queues[int(which)] = replace(queues[int(which)], **{str(key): difference.value})
        else:
            # the documented places of GPUs do not hold for another number of them
            more: dict[str, Any] = {"gpu_numa": ()} if key == "gpus" else {}
            nodes[str(which)] = replace(nodes[str(which)], **{str(key): difference.value, **more})
        origins[path] = f"{_PROGRAMS[batch][block == 'nodes']}, not {site.at(*path) or 'its file'}"
    return replace(site, queues=tuple(queues), nodes=nodes, origins=MappingProxyType(origins))
