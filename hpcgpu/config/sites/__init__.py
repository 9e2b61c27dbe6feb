"""Sites: which one this machine is, its live facts, its rules for a request, and the draft of a site file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, fields, replace
from types import MappingProxyType
from typing import Any

import yaml

from hpcgpu.config import option_of
from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.model.settings import Settings, options, user_name
from hpcgpu.model.site import Inventory, Match, NodeType, Path, Queue, Site
from hpcgpu.units import format_duration, parse_bytes, parse_duration_s

NEVERTHELESS = (
    "sites change: site_limits=False submits it nevertheless, and site= also takes the path of a file of your own"
)
Said = Mapping[str, tuple[Any, str]]  # as in config.layers: a value, and where it was set


def nodes_for(values: Said, site: Site | None) -> dict[str, tuple[Any, str]]:
    """Return ``nodes`` and ``gpus_per_node`` in place of ``gpus=8``; ConfigError if unknown or not whole nodes."""
    total, where = int(values["gpus"][0]), values["gpus"][1]
    rest = {name: value for name, value in values.items() if name != "gpus"}
    node = site.node(rest.get("queue", (None, ""))[0]) if site else None
    nodes, each = rest.get("nodes", (None, ""))[0], rest.get("gpus_per_node", (None, ""))[0]
    most = each or (node.gpus if node else None)
    if most is None and nodes is None:
        machine = f"the nodes in the file of {site.name}, which has none" if site else "site= of a known machine"
        raise ConfigError(
            f"gpus={total} is the total of real GPUs: give gpus_per_node={total} (and nodes=), or {machine}; for "
            f"simulated GPUs give simulate= those of each node, '4' or '4x256MiB'; set by {where}"
        )
    count = nodes or -(-total // (most or total))
    if total % count or (each and each * count != total) or (most and total // count > most):
        of = f" of {site.name}" if site and not each else ""
        has = f"nodes{of} have {most}" if most else "each node has as many"
        raise ConfigError(
            f"gpus={total} (set by {where}){f' on nodes={nodes}' if nodes else ''}: {has}; allowed: 1 to "
            f"{most or total} on one node, or a multiple of the number of nodes; nodes= and gpus_per_node= set both "
            "numbers"
        )
    if node and site and most and not (nodes and each):
        where = f"{where}; {most} on a node: {site.place(*site.path_of(node), 'gpus')}"
    return {"nodes": (count, where), "gpus_per_node": (total // count, where), **rest}


def follow(site: Site, users: Said, environ: Mapping[str, str], *, asks: bool) -> dict[str, tuple[Any, str]]:
    """Return the site's settings below the ``users``': its defaults, and what follows from queue and nodes."""
    # environ has the account of users of some sites. asks: for a job to submit; else for a run inside a job.
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


def _queue_for(site: Site, values: Said) -> Queue | None:
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
        yield "nodes", f"nodes={nodes}, but {takes} {_range(queue.nodes)} nodes", "nodes="
    if queue.gpus and gpus and not queue.gpus[0] <= gpus <= queue.gpus[1]:
        yield "gpus", f"{gpus} GPUs, but {takes} {_range(queue.gpus)}", "gpus=, nodes="
    longest = queue.walltime_s(nodes)
    if walltime_s and longest is not None and walltime_s > longest:
        of, most = f" of {nodes} nodes" if queue.walltime_by_nodes else "", f"{format_duration(longest)} at most"
        text = f"walltime={format_duration(walltime_s)}, but jobs{of} in queue {queue.name} have {most}"
        yield "walltime", text, "walltime="
    if elastic and 1 in (queue.jobs_per_user, queue.submitted_per_user):
        text = f"shape='elastic' needs several jobs, but queue {queue.name} has one job of each user at a time"
        yield "jobs_per_user", text, "shape="
    if elastic and queue.nodes and queue.nodes[0] > 1:
        text = "the jobs that come and go with shape='elastic' have one node"
        yield "nodes", f"{text}, but {takes} {queue.nodes[0]} at least", "shape="


def _range(limits: tuple[int, int]) -> str:
    return str(limits[0]) if limits[0] == limits[1] else f"{limits[0]} to {limits[1]}"


def _in_proportion(site: Site, node: NodeType, queue: Queue | None, values: Said) -> dict[str, tuple[Any, str]]:
    """Return the CPUs of each GPU and the memory of the requested GPUs, where the site lets jobs ask for them."""
    # For a node that others share, its cores and a part of its memory are used if the file has no limits for jobs.
    shared = queue is not None and bool(queue.shared)
    out: dict[str, tuple[Any, str]] = {}
    path, of = site.path_of(node), f": in proportion to {node.gpus} GPUs of a node"
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


def _number(values: Said, name: str, default: int) -> int:
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
            f"{', '.join(f'{name}=...' for name in missing)} (or HPCGPU_{missing[0].upper()} in the environment)"
            f"{''.join(f'; {text}' for text in texts)} ({'; '.join(dict.fromkeys(cited))})"
        )
    options_given = {option_of(text) for text in settings.job_extra_directives}
    for rule in site.rules:
        if settings.site_limits and rule.require.startswith("-") and option_of(rule.require) not in options_given:
            raise ConfigError(
                f"site {site.name} refuses a job without {rule.require}{f' ({rule.why})' if rule.why else ''}: give "
                f"it in job_extra_directives ({site.cited(rule)}); {NEVERTHELESS}"
            )


def beyond(settings: Settings, site: Site) -> Iterator[str]:
    """Yield each limit of the job's queue that the job exceeds, with its source and what to change."""
    if (queue := site.queue(settings.queue)) is None:
        return
    names = [other.name for other in site.queues if other.name != queue.name]
    others = f" ({', '.join(names)})" if names else ""
    gpus, elastic = settings.nodes * (settings.gpus_per_node or 0), settings.shape == "elastic"
    for key, text, options_ in _exceeded(queue, settings.nodes, gpus, settings.walltime_s, elastic=elastic):
        yield f"{text} ({site.cited(queue, key)}); change {options_} or queue={others}"


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
_PORTS = ("infiniband", "roce", "slingshot", "opa")
_MORE = {
    "title": "the machine and the centre",
    "match": "a variable or host name that tells this machine from others; match: {host: ...}",
    "queues": "none with GPUs was seen; queues: [{name: gpu, nodes: [1, 8], walltime: 24h}]",
    "nodes": "none with GPUs was seen; nodes: {gpu: {gpus: 4, cpus: 64}}",
    "defaults": "the queue that is taken where queue= is not given; defaults: {queue: ...}",
    "account": "is a job without one refused, and which variable has it; account: {needed: true, env: [...]}",
    "rules": "what must jobs say or not say; rules: [{require: walltime}, {forbid: --mem, why: ...}]",
    "network.ucx": "has UCX a transport for the network, and which interfaces are used",
    "launcher": "what starts ranks, if it is not found by itself; launcher: {command: [mpiexec]}",
    "scratch": "the fast local folder of the nodes; scratch: {path: $TMPDIR}",
    "modules": "must every job load some; modules: {load: [cuda]}",
    "login": "what happens to processes that compute on login nodes; login: {policy: ...}",
    "dashboard": "has the site a portal for web pages of nodes; dashboard: {url: 'https://.../{node}/{port}/'}",
    "charge": "what a job costs; charge: {unit: SU, per_gpu_hour: 1}",
}


def render_draft(
    inventory: Inventory, name: str, date: str, topology: Topology | None, match: Mapping[str, str]
) -> str:
    """Return the YAML of a draft, which ``hpcgpu site check`` accepts, and below it what is unknown."""
    # topology is this node's, None if unreadable; match has variables that name the machine, with their values
    is_slurm = inventory.batch == "slurm"
    programs = "sinfo and scontrol" if is_slurm else "pbsnodes and qstat"
    dialect = {"gpu_type": inventory.gpu_type, "array_limit": inventory.array_limit}
    blocks: dict[str, dict[str, Any]] = {
        "match": {"env": dict(match)} if match else {},
        "dialect": {key: value for key, value in dialect.items() if value},
        "defaults": {"queue": inventory.default} if inventory.default in [q.name for q in inventory.queues] else {},
    }
    places = {key: _places(node, topology) for key, node in inventory.nodes.items()}
    facts: dict[str, Any] = {
        **{"version": 2, "name": name, "batch": inventory.batch},
        "sources": {"M": {"title": f"what {programs} say on the machine", "date": date}},
        **{key: {**block, "source": "M"} for key, block in blocks.items() if block},
        "queues": [{**_as_plain(queue), "source": "M"} for queue in inventory.queues],
        "nodes": {key: {**_as_plain(node), **places[key], "source": "M"} for key, node in inventory.nodes.items()},
    }
    facts = {key: value for key, value in facts.items() if value}
    gpus = "gpus-per-node, gres, gpus or none" if is_slurm else "ngpus, gpus or none"
    unknown = [
        *inventory.silent,
        f"dialect: how the site wants GPUs, CPUs and memory asked for (gpus: {gpus}; memory: none; cpus: false)",
        "how much of the memory jobs may ask for, if it is less than job_memory",
    ]
    for queue in inventory.queues:
        if missing := [key for key in ("nodes", "walltime") if getattr(queue, key) is None]:
            unknown.append(f"{' and '.join(missing)} of queue {queue.name}, or unlimited")
    for key in (key for key, values in places.items() if not values):
        unknown.append(f"{key}.numa_cores, gpu_numa, ports: run hpcgpu site new on such a node, in a job")
    unknown += [f"{key}: {text}" for key, text in _MORE.items() if key not in facts]
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None)
    return text + "".join(f"{UNKNOWN} {line}\n" for line in unknown)


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
        if nic.kind in _PORTS and nic.active and not nic.virtual
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
