"""A site's settings for a job, and its rules for a request.

Together: ``gpus=`` as a total becomes nodes by the same rules before any other is followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpcgpu.config.values import Layer, option_of
from hpcgpu.errors import ConfigError, opt
from hpcgpu.model.settings import Settings, options, user_name
from hpcgpu.model.site import NodeType, Queue, Site
from hpcgpu.units import format_duration, parse_bytes, parse_duration_s

NEVERTHELESS = (
    f"sites change: {opt('site_limits', False)} submits it nevertheless, and {opt('site')} also takes the path "
    "of a file of your own"
)


def nodes_for(values: Layer, site: Site | None) -> dict[str, tuple[Any, str]]:
    """Return ``nodes`` and ``gpus_per_node`` in place of ``gpus=8``; ConfigError if unknown or not whole nodes."""
    total, where = int(values["gpus"][0]), values["gpus"][1]
    rest = {name: value for name, value in values.items() if name != "gpus"}
    node = site.node(rest.get("queue", (None, ""))[0]) if site else None
    nodes, each = rest.get("nodes", (None, ""))[0], rest.get("gpus_per_node", (None, ""))[0]
    most = each or (node.gpus if node else None)
    if most is None and nodes is None:
        machine = f"{opt('site')} of a known machine"
        if site:
            machine = f"the nodes in the file of {site.name}, which has none"
        raise ConfigError(
            f"{opt('gpus', total)} is the total of real GPUs: give {opt('gpus_per_node', total)} (and "
            f"{opt('nodes')}), or {machine}; for simulated GPUs give {opt('simulate')} those of each node, '4' or "
            f"'4x256MiB'; set by {where}"
        )
    count = nodes or -(-total // (most or total))
    if total % count or (each and each * count != total) or (most and total // count > most):
        of = f" of {site.name}" if site and not each else ""
        on = f" on {opt('nodes', nodes)}" if nodes else ""
        has = f"nodes{of} have {most}" if most else "each node has as many"
        raise ConfigError(
            f"{opt('gpus', total, where)}{on}: {has}; allowed: 1 to {most or total} on one node, or a multiple of the "
            f"number of nodes; {opt('nodes')} and {opt('gpus_per_node')} set both numbers"
        )
    if node and site and most and not (nodes and each):
        where = f"{where}; {most} on a node: {site.place(*site.path_of(node), 'gpus')}"
    return {"nodes": (count, where), "gpus_per_node": (total // count, where), **rest}


def follow(site: Site, users: Layer, environ: Mapping[str, str], *, asks: bool) -> dict[str, tuple[Any, str]]:
    """Return the site's settings below the ``users``': its defaults, and what follows from queue and nodes.

    ``environ`` has the account of users of some sites; ``asks``: for a job to submit, else for a run inside a job.
    """
    out: dict[str, tuple[Any, str]] = {
        name: (value, site.place("defaults", name)) for name, value in site.settings.items()
    }
    queue = _queue_for(site, {**out, **users}) if "queue" not in users else site.queue(users["queue"][0])
    if queue and queue.name != out.get("queue", ("",))[0]:
        out["queue"] = (queue.name, f"{site.place(*site.path_of(queue))}: the first of its queues for such a job")
    node = site.node(queue.name if queue else None)
    if node and "gpus" not in users and "gpus_per_node" not in out:
        out["gpus_per_node"] = (node.gpus, site.place(*site.path_of(node), "gpus"))
    if site.scratch.path and not site.scratch.in_memory:
        out.setdefault("local_directory", (site.scratch.path, site.place("scratch", "path")))
    if not asks:
        return out
    lines = [f"module use {folder}" for folder in site.modules.use]
    if site.modules.load:
        lines.append(f"module load {' '.join(site.modules.load)}")
    if lines:
        after, place = out.get("job_script_prologue", ((), ""))
        where = f"{site.place('modules')} and {place}" if place else site.place("modules")
        out["job_script_prologue"] = ([*lines, *after], where)
    if queue and queue.directives:
        options, where = {option_of(text) for text in queue.directives}, site.place(*site.path_of(queue), "directives")
        texts, also = out.get("job_extra_directives", ((), ""))
        kept = [text for text in texts if option_of(text) not in options]
        out["job_extra_directives"] = ([*kept, *queue.directives], f"{also} and {where}" if kept else where)
    if variable := next((name for name in site.account.env if environ.get(name)), ""):
        out.setdefault("account", (environ[variable], f"{variable}, as {site.place('account', 'env')} has it"))
    if node and "gpus" not in users:
        out |= _in_proportion(site, node, queue, {**out, **users})
    return out


def _queue_for(site: Site, values: Layer) -> Queue | None:
    """Return the default queue; if it refuses the job, the first other one with such nodes that accepts it."""
    default = site.queue(None)
    if default is None:
        return None
    node, nodes, each = site.node(default.name), _number(values, "nodes", 1), values.get("gpus_per_node", (0, ""))[0]
    total = nodes * (each or (node.gpus if node else 0))
    walltime = values.get("walltime", (None, ""))[0]
    seconds = None if walltime is None else parse_duration_s(walltime)
    elastic = values.get("shape", ("", ""))[0] == "elastic"
    others = [q for q in site.queues if q.node == default.node and q.preemption is None]
    fitting = (q for q in (default, *others) if not any(_exceeded(q, nodes, total, seconds, elastic=elastic)))
    return next(fitting, default)


def _exceeded(
    queue: Queue, nodes: int, gpus: int, walltime_s: int | None, *, elastic: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield each limit of a queue that a job exceeds: its key, the excess, and the options to change.

    ``elastic``: jobs of one node come beside it.
    """
    takes = f"queue {queue.name} takes"
    if queue.nodes and not queue.nodes[0] <= nodes <= queue.nodes[1]:
        yield "nodes", f"{opt('nodes', nodes)}, but {takes} {_range(queue.nodes)} nodes", opt("nodes")
    if queue.gpus and gpus and not queue.gpus[0] <= gpus <= queue.gpus[1]:
        yield "gpus", f"{gpus} GPUs, but {takes} {_range(queue.gpus)}", f"{opt('gpus')}, {opt('nodes')}"
    longest = queue.walltime_s(nodes)
    if walltime_s and longest is not None and walltime_s > longest:
        of, most = f" of {nodes} nodes" if queue.walltime_by_nodes else "", f"{format_duration(longest)} at most"
        walltime = opt("walltime", format_duration(walltime_s))
        yield "walltime", f"{walltime}, but jobs{of} in queue {queue.name} have {most}", opt("walltime")
    shape = opt("shape", "elastic")
    if elastic and 1 in (queue.jobs_per_user, queue.submitted_per_user):
        text = f"{shape} needs several jobs, but queue {queue.name} has one job of each user at a time"
        yield "jobs_per_user", text, opt("shape")
    if elastic and queue.nodes and queue.nodes[0] > 1:
        text = f"the jobs that come and go with {shape} have one node"
        yield "nodes", f"{text}, but {takes} {queue.nodes[0]} at least", opt("shape")


def _range(limits: tuple[int, int]) -> str:
    return str(limits[0]) if limits[0] == limits[1] else f"{limits[0]} to {limits[1]}"


def _in_proportion(site: Site, node: NodeType, queue: Queue | None, values: Layer) -> dict[str, tuple[Any, str]]:
    """Return the CPUs of each GPU and the memory of the requested GPUs, where the site lets jobs ask for them.

    Of a node that others share it is its cores and a part of its memory, if the file has no limits for jobs.
    """
    shared = queue is not None and bool(queue.shared)
    out: dict[str, tuple[Any, str]] = {}
    path, of = site.path_of(node), f": in proportion to {node.gpus} GPUs of a node"
    if values.get("gpus_per_node", (None, ""))[0] == 0:  # its workers have the cores and the memory that they ask for
        return out
    beside = _number(values, "cpu_workers", 0) * _number(values, "nthreads", 1)
    cpus, key = (node.cpus, "cpus") if node.cpus or not shared else (node.cores, "cores")
    if cpus and site.dialect.get("cpus") is not False:
        out["cores_per_gpu"] = (max(1, (cpus - beside) // node.gpus), site.place(*path, key) + of)
    count, option = min(_number(values, "gpus_per_node", node.gpus), node.gpus), site.dialect.get("memory")
    if node.job_memory is not None and option != "none":
        out["memory"] = (parse_bytes(node.job_memory) * count // node.gpus, site.place(*path, "job_memory") + of)
    elif node.memory is not None and shared and option not in (None, "none"):
        # Jobs get 88.6 % (derecho.yaml) to 100 % (snellius.yaml) of a node's documented memory, where documents have
        # both; a request above the node's memory is refused. So an eighth is left out.
        size = parse_bytes(node.memory) * 7 // 8 * count // node.gpus
        out["memory"] = (size, site.place(*path, "memory") + f"{of}, without the eighth that the system may keep")
    return out


def _number(values: Layer, name: str, default: int) -> int:
    return int(values.get(name, (default, ""))[0])


def check_submission(settings: Settings, site: Site | None, *, member: bool = False) -> None:
    """Raise ConfigError, with rules and sources, if the site would refuse the job; ``member``: a job of one node."""
    if site is None:
        return
    _check_required(settings, site)
    checked = replace(settings, nodes=1) if member else settings
    violations = tuple(beyond(checked, site)) if settings.site_limits else ()
    if violations:
        raise ConfigError(f"site {site.name} would refuse this job: {'; '.join(violations)}. {NEVERTHELESS}")


def notes(settings: Settings, site: Site | None) -> tuple[str, ...]:
    """Return messages for users of a site on a job that it accepts."""
    if site is None or settings.scheduler != "here" or not site.login.policy:
        return ()
    cited = site.cited(site.login, "policy")
    return (
        f"{settings.cite('scheduler')}: on a login node of {site.name}, {site.login.policy} ({cited}); leave scheduler "
        "out, and it is in the job",
    )


def forbidden(settings: Settings, site: Site) -> Mapping[str, str]:
    """Return the batch system's options that the site refuses, each with a message about its rule."""
    if not settings.site_limits:
        return {}
    return {
        rule.forbid: f"site {site.name} refuses {rule.forbid}{f' ({rule.why})' if rule.why else ''}: "
        f"{site.cited(rule)}. Leave it out; {NEVERTHELESS}"
        for rule in site.rules
        if rule.forbid
    }


def _check_required(settings: Settings, site: Site) -> None:
    by_name = {user_name(f): getattr(settings, f.name) for f in options()}
    missing = [name for name in site.required if by_name[name] in (None, (), "")]
    if missing:
        rules = [rule for rule in site.rules if rule.require in missing]
        texts = filter(None, (site.account.text if "account" in missing else "", *(rule.why for rule in rules)))
        cited = [site.cited(rule) for rule in rules]
        if "account" in missing and site.account.needed:
            cited.insert(0, site.cited(site.account, "needed"))
        raise ConfigError(
            f"site {site.name} refuses a job without {' and '.join(missing)}: give "
            f"{', '.join(opt(name, ...) for name in missing)} (or HPCGPU_{missing[0].upper()} in the environment)"
            f"{''.join(f'; {text}' for text in texts)} ({'; '.join(dict.fromkeys(cited))})"
        )
    options_given = {option_of(text) for text in settings.job_extra_directives}
    for rule in site.rules:
        if settings.site_limits and rule.require.startswith("-") and option_of(rule.require) not in options_given:
            raise ConfigError(
                f"site {site.name} refuses a job without {rule.require}{f' ({rule.why})' if rule.why else ''}: give "
                f"it in {opt('job_extra_directives', None)} ({site.cited(rule)}); {NEVERTHELESS}"
            )


def beyond(settings: Settings, site: Site) -> Iterator[str]:
    """Yield each limit of the job's queue that the job exceeds, with its source and what to change."""
    if (queue := site.queue(settings.queue)) is None:
        return
    names = [other.name for other in site.queues if other.name != queue.name]
    others = f" ({', '.join(names)})" if names else ""
    gpus, elastic = settings.nodes * (settings.gpus_per_node or 0), settings.shape == "elastic"
    for key, text, options_ in _exceeded(queue, settings.nodes, gpus, settings.walltime_s, elastic=elastic):
        yield f"{text} ({site.cited(queue, key)}); change {options_} or {opt('queue')}{others}"
