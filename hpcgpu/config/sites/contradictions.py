"""The contradictions in a site file: values that others forbid, and names that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcgpu.config.layers import read_layer
from hpcgpu.config.values import nearest, option_of
from hpcgpu.errors import ConfigError, whole
from hpcgpu.model.settings import options, user_name
from hpcgpu.model.site import Path, Site, SlurmDialect, dotted, tags_of
from hpcgpu.units import format_duration, parse_duration_s

_KNOWN = frozenset(user_name(f) for f in options()) - {"site"}


def contradictions(site: Site) -> Iterator[str]:
    """Yield each value that contradicts another or names a missing one: its place, its path, the reason."""
    for path, message in (*_names(site), *_forbidden(site), *_defaults(site)):
        yield f"{site.at(*path)}: {dotted(path)}: {message}"


def _names(site: Site) -> Iterator[tuple[Path, str]]:
    for path, _, tags in site.blocks():
        for tag in tags_of(tags):
            if tag not in site.sources:
                yield (*path, "source"), f"{tag!r} is not among the sources; {nearest(tag, site.sources) or 'none'}"
    names = [queue.name for queue in site.queues]
    for i, queue in enumerate(site.queues):
        if queue.name in names[:i]:
            yield ("queues", i, "name"), f"{queue.name!r} is there twice; a queue has one entry"
        if queue.node and queue.node not in site.nodes:
            yield ("queues", i, "node"), f"{queue.node!r} is no type of nodes; {nearest(queue.node, site.nodes)}"
        node = site.node(queue.name)
        if node and queue.nodes and queue.gpus and queue.gpus[0] > queue.nodes[1] * node.gpus:
            yield ("queues", i, "gpus"), f"{queue.nodes[1]} nodes of {node.gpus} GPUs have fewer than {queue.gpus[0]}"
    for i, rule in enumerate(site.rules):
        if rule.require and not rule.require.startswith("-") and rule.require not in _KNOWN:
            yield ("rules", i, "require"), f"{rule.require!r} is no setting; {nearest(rule.require, _KNOWN)}"
        if rule.forbid and not rule.forbid.startswith("-"):
            yield ("rules", i, "forbid"), f"{rule.forbid!r} is no option of a batch system, such as --mem"


def _forbidden(site: Site) -> Iterator[tuple[Path, str]]:
    forbidden = {rule.forbid: i for i, rule in enumerate(site.rules) if rule.forbid}
    for i, rule in enumerate(site.rules):
        if rule.require in forbidden:
            other = forbidden[rule.require]
            yield ("rules", i, "require"), f"{rule.require} is required here and forbidden by rules[{other}]"
    if site.batch == "slurm":
        for key in ("gpus", "memory", "cpus"):  # what the script has if the file does not say; cpus: --cpus-per-task
            value = site.dialect.get(key, getattr(SlurmDialect(), key))
            option = "--cpus-per-task" if value is True else f"--{value}"
            if option in forbidden:
                yield (
                    ("dialect", key) if key in site.dialect else ("rules", forbidden[option], "forbid"),
                    f"{option} is forbidden, but dialect.{key} writes it: write dialect: "
                    f"{{{key}: {'false' if key == 'cpus' else 'none'}}}",
                )
    lists: list[tuple[Path, Any]] = [(("queues", i, "directives"), q.directives) for i, q in enumerate(site.queues)]
    for path, texts in [*lists, (("defaults", "job_extra_directives"), site.defaults.get("job_extra_directives", ()))]:
        for text in texts if isinstance(texts, (list, tuple)) else (texts,):
            if (option := option_of(str(text))) in forbidden:
                yield path, f"{text!r} is given, but {option} is forbidden by rules[{forbidden[option]}]"


def _defaults(site: Site) -> Iterator[tuple[Path, str]]:
    if "site" in site.defaults:
        yield ("defaults", "site"), "'site' is no setting that a site can have"
    wrong = set()
    for name, value in site.settings.items():
        try:
            read_layer({name: value}, lambda _: "this file")
        except ConfigError as error:
            wrong.add(name)
            yield ("defaults", name), whole(error, lambda part: part.replace("=", ": ", 1).rstrip())  # as YAML has it
    queue, named = site.queue(None), site.defaults.get("queue")
    if site.queues and named and not queue:
        hint = nearest(str(named), [q.name for q in site.queues])
        yield ("defaults", "queue"), f"{named!r} is not among the queues; {hint}"
    if len(site.nodes) > 1 and site.queues and any(not q.node for q in site.queues):
        which = next(i for i, q in enumerate(site.queues) if not q.node)
        yield ("queues", which), f"there are {len(site.nodes)} types of nodes: say node: {' or '.join(site.nodes)}"
    # numbers that the default queue and its nodes do not have
    nodes, each = site.defaults.get("nodes"), site.defaults.get("gpus_per_node")
    if queue and queue.nodes and isinstance(nodes, int) and not queue.nodes[0] <= nodes <= queue.nodes[1]:
        yield ("defaults", "nodes"), f"{nodes}, but queue {queue.name} takes {queue.nodes[0]} to {queue.nodes[1]} nodes"
    if (node := site.node()) and isinstance(each, int) and each > node.gpus:
        yield ("defaults", "gpus_per_node"), f"{each}, but the nodes of the default queue have {node.gpus}"
    walltime, longest = site.defaults.get("walltime"), queue.walltime_s(1) if queue else None
    if walltime and longest and "walltime" not in wrong and parse_duration_s(walltime) > longest:
        yield ("defaults", "walltime"), f"{walltime}, but queue {named} has a limit of {format_duration(longest)}"
