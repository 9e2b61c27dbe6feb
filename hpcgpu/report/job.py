"""Show a job before it is submitted: the request, ranks and workers, the cost, and what is poor about it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcgpu.errors import opt, plain
from hpcgpu.model import JobSpec, Layout, Settings, Site
from hpcgpu.model.allocation import Limits
from hpcgpu.model.settings import Limit, options, user_name
from hpcgpu.plan.jobs.needs import OF_NODES, Size, needs, shortages
from hpcgpu.plan.jobs.request import gpus_per_node
from hpcgpu.plan.layout import RankRecord, plan_layout
from hpcgpu.report.machine import MachinePlan, describe, format_ports, poor
from hpcgpu.report.machine import differences as plain_differences
from hpcgpu.report.table import Column, Table
from hpcgpu.units import counted, format_bytes, format_duration

_UNKNOWN = Limits()
_SCRIPT, _COMMAND = "script", "command"
_SETTING = (Column("setting"), Column("value"), Column("set by", kind="prose"))
_NEED = (Column("at least"), Column("needed", kind="number"), Column("allowed here"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """The plan of a job."""

    settings: Settings  # with where each was set
    spec: JobSpec | None  # None: no request, as the job exists already
    script: str  # of the job; without a request the command
    site: Site | None
    layout: Layout
    node: MachinePlan | None  # None: unknown
    node_from: str  # the source of node, or how to get one
    starts: str = ""  # expected by the batch system; empty: unknown
    granted: str = ""  # without a request: the job around this process
    limits: Limits = _UNKNOWN  # of this machine
    imports: str = ""  # what the start of its nodes reads from a network file system; empty: little
    has_scheduler: bool = True  # False: a job of a pool, whose ranks are workers


def layout_of(settings: Settings, nodes: int, gpus: int, *, has_scheduler: bool = True) -> Layout:
    """Plan ranks and workers as the ranks will agree on it: rank 0 and the ranks of its node come first."""
    per_gpu = settings.ranks_per(nodes) == "gpu"
    each, extra = max(1, gpus) if per_gpu else 1, int(per_gpu and has_scheduler)
    homes = [0] * (each + extra) + [node for node in range(1, nodes) for _ in range(each)]
    records = [RankRecord(rank, str(node), gpus) for rank, node in enumerate(homes)]
    each, beside = settings.workers_per_gpu, settings.cpu_workers
    return plan_layout(records, nodes, each, beside, without_gpus=gpus == 0)


def warnings(plan: Preview) -> list[str]:
    """Return the faults of the plan that people may not expect, each with advice."""
    texts = [*_poor_request(plan, plan.spec)] if plan.spec else []
    texts += poor(plan.node) if plan.node else ()
    texts += (f"{text}{OF_NODES * (plan.spec is not None)}" for text in shortages(Size.of(plan.layout), plan.limits))
    if plan.imports:
        texts += [
            f"{plan.imports}: {opt('environment', 'stage')} has each node copy the environment once, to its own disk"
        ]
    return list(map(plain, texts))


def _poor_request(plan: Preview, spec: JobSpec) -> Iterator[str]:
    cores = (spec.cpus_per_task or 1) * spec.tasks_per_node
    whole = plan.site is not None and plan.site.dialect.get("cpus") is False
    gpus = spec.gpus_per_node or gpus_per_node(plan.settings)
    if not whole and "--exclusive" not in spec.extra_directives and cores <= gpus:
        yield f"{counted(cores, 'core')} for {counted(gpus, 'GPU')} of each node: ask for more, {opt('cores_per_gpu')}"
    no_memory = plan.site is not None and plan.site.dialect.get("memory") in (False, "none")
    if not no_memory and spec.memory_per_node_bytes is None and "--exclusive" not in spec.extra_directives:
        yield f"no memory is requested, and a queue's default may be small: ask by {opt('memory')} (of each node)"
    if spec.walltime_s is None:
        yield f"no time limit is requested: the queue's default is valid; shorter jobs start sooner: {opt('walltime')}"


def cost(plan: Preview) -> str:
    """Format the cost of the job if it runs to its time limit, by the site's rule; "" without rule or limit."""
    site, spec = plan.site, plan.spec
    if not site or not spec or spec.walltime_s is None:
        return ""
    charge, queue = site.charge, site.queue(spec.queue)
    gpus = spec.gpus_per_node or (node.gpus if (node := site.node(spec.queue)) else 0)
    per_hour = (charge.per_node_hour or 0) + (charge.per_gpu_hour or 0) * gpus
    if not per_hour:
        return ""
    factor = queue.charge if queue and queue.charge is not None else 1.0
    total = per_hour * factor * spec.nodes * spec.walltime_s / 3600
    of_queue = f" times {factor:g} in {queue.name}" if queue and factor != 1 else ""
    each = f"{charge.per_node_hour:g} for a node" if charge.per_node_hour else f"{charge.per_gpu_hour:g} for a GPU"
    amount, limit = f"about {total:.4g} {charge.unit or 'units'}", format_duration(spec.walltime_s)
    cited = site.cited(charge)
    return f"{amount} if it runs to its limit of {limit}: {each} and hour{of_queue} ({cited})"


def _sections(plan: Preview) -> dict[str, Table]:
    """Return the sections of a plan by their names, without the empty ones."""
    node = plan.node.workers if plan.node else Table((), ())
    request = Table(_SETTING, [*_request(plan), *((f"dialect.{name}", *rest) for name, *rest in _dialect(plan))])
    sections = {
        "settings": settings_table(plan.settings),
        "request" if plan.spec else "job": request if plan.spec else _lines([plan.granted]),
        "layout": _lines(_layout(plan)),
        "node": replace(node, title=plan.node_from),
        "memory": _lines(_memory(plan)),
        "network": _lines(_network(plan)),
        "needs": needs_table(Size.of(plan.layout), plan.limits),
        "estimates": _lines(_estimates(plan)),
        "warnings": _lines(f"warning: {text}" for text in warnings(plan)),
        _SCRIPT if plan.spec else _COMMAND: _lines(plan.script.splitlines()),
    }
    return {name: table for name, table in sections.items() if table.rows or table.notes or table.title}


def settings_table(settings: Settings) -> Table:
    """Show name, value and place of each setting that is not a default."""
    values = list(_changed(settings))
    return Table(_SETTING, values, notes=() if values else ["all settings are defaults"])


def needs_table(size: Size, limits: Limits) -> Table:
    """Show what a cluster needs at least, beside what limits allow."""
    return Table(_NEED, [need.texts for need in needs(size, limits)])


def _changed(settings: Settings) -> Iterator[tuple[str, str, str]]:
    for option in options():
        if (where := settings.where(name := user_name(option))) != "default":
            yield name, _format(option.name, getattr(settings, option.name)), where


def _format(name: str, value: Any) -> str:  # of any option
    """Format a value as people write it on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return shlex.join(f"{key}={_format('', each)}" for key, each in value.items())
    if isinstance(value, tuple):
        return shlex.join(value)
    if isinstance(value, Limit):
        return format_bytes(value.value) if value and isinstance(value.value, int) else str(value.value)
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int) and name.endswith("_s"):
        return format_duration(value)
    if isinstance(value, float):
        return f"{value:g}{' s' if name.endswith('_s') else ''}"
    return str(value)


def _lines(lines: Iterable[str]) -> Table:
    return Table((), (), notes=tuple(lines))


def render(plan: Preview, width: int = 0) -> str:
    """Format the plan as text; ``width`` is that of the terminal, 0: unlimited."""
    texts = []
    for name, table in _sections(plan).items():
        lines = table.to_text(0 if name in (_SCRIPT, _COMMAND) else max(width - 2, 0)).splitlines()
        texts.append("\n".join((f"{name}:", *(f"  {line}".rstrip() for line in lines), "")))
    return "\n".join(texts)


def described(plan: Preview) -> dict[str, Any]:
    """Convert the plan to plain data: the sections of its text, and the node as in ``hpcgpu topo --json``."""
    node = plan.node
    workers = describe(node.facts.topology, node.specs, "", node.settings.nics) if node else {}
    return {
        "settings": {name: {"value": value, "from": where} for name, value, where in _changed(plan.settings)},
        "request": {name: f"{value} ({where})" for name, value, where in _request(plan)},
        "dialect": {name: f"{value} ({where})" for name, value, where in _dialect(plan)},
        "layout": [{"ranks": list(n.ranks), "workers": n.worker_count} for n in plan.layout.nodes],
        "node": {"from": plan.node_from, **workers},
        "memory": list(_memory(plan)),
        "network": list(_network(plan)),
        "needs": [need._asdict() for need in needs(Size.of(plan.layout), plan.limits)],
        "estimates": list(_estimates(plan)),
        "warnings": warnings(plan),
        _SCRIPT: plan.script.splitlines(),
    }


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return where two described plans differ: values by their path, scripts line by line."""
    out = list(plain_differences({**before, _SCRIPT: None}, {**after, _SCRIPT: None}))
    lines = list(difflib.unified_diff(before.get(_SCRIPT, []), after.get(_SCRIPT, []), lineterm="", n=0))[2:]
    return (*out, *(f"{_SCRIPT}: {line}" for line in lines if not line.startswith("@@")))


def _request(plan: Preview) -> Iterator[tuple[str, str, str]]:
    spec, settings = plan.spec, plan.settings
    if spec is None:
        return
    memory_bytes = spec.memory_per_node_bytes
    for name, value, setting in (
        ("queue", spec.queue, "queue"),
        ("account", spec.account, "account"),
        ("time limit", None if spec.walltime_s is None else format_duration(spec.walltime_s), "walltime"),
        ("nodes", spec.nodes, "nodes"),
        ("GPUs of each node", spec.gpus_per_node or settings.gpus, "gpus" if settings.gpus else "gpus_per_node"),
        ("cores of each rank", spec.cpus_per_task, "cores_per_gpu"),
        ("memory of each node", None if memory_bytes is None else format_bytes(memory_bytes), "memory"),
    ):
        yield name, str(value or "not requested"), settings.where(setting)


def _dialect(plan: Preview) -> Iterator[tuple[str, str, str]]:
    """Yield the dialect of the site's batch system, each key with its place in the site file."""
    if site := plan.site:
        for name, value in site.spoken.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield name, text, site.place("dialect", name)


def _layout(plan: Preview) -> Iterator[str]:
    first, *others = plan.layout.nodes
    ranks = sum(len(node.ranks) for node in plan.layout.nodes)
    scheduler = "; rank 0 has the scheduler" if plan.has_scheduler else ""
    yield f"{counted(ranks, 'rank')} and {counted(plan.layout.worker_count, 'worker')}{scheduler}"
    span = f"{first.ranks[0]} to {first.ranks[-1]}" if len(first.ranks) > 1 else str(first.ranks[0])
    yield f"first node: ranks {span}, {counted(first.worker_count, 'worker')}"
    if others:
        each = f"each of {len(others)} others" if len(others) > 1 else "the other node"
        yield f"{each}: {counted(len(others[0].ranks), 'rank')}, {counted(others[0].worker_count, 'worker')}"


def _memory(plan: Preview) -> Iterator[str]:
    settings = plan.settings
    yield f"device: spilling begins at {settings.device_memory_limit} ({settings.where('device_memory_limit')})"
    limits = {spec.memory_limit_bytes for spec in plan.node.specs} if plan.node else set()
    sizes = " or ".join(format_bytes(n) if n else "no limit" for n in sorted(limits, key=lambda n: n or 0))
    limit = f"{settings.memory_limit} ({settings.where('memory_limit')})"
    yield f"host: each worker has {limit}{f', here {sizes}' if sizes else ''}"
    yield f"disk: {settings.local_directory or 'the folder of temporary files'} ({settings.where('local_directory')})"


def _network(plan: Preview) -> Iterator[str]:
    settings, site = plan.settings, plan.site
    protocol = settings.protocol or ("tcp" if settings.security is False else "tls")
    yield f"protocol {protocol} ({settings.where('protocol' if settings.protocol else 'security')})"
    if site and (kind := site.network.kind):
        ucx = ", for which UCX has no transport" if site.network.ucx is False else ""
        yield f"{kind}{ucx} ({site.cited(site.network)})"
    if plan.node:
        ports = {format_ports(spec.binding) for spec in plan.node.specs} - {"-"}
        if ports:
            yield f"each worker's own of: {', '.join(sorted(ports))} ({settings.where('nics')})"


def _estimates(plan: Preview) -> Iterator[str]:
    if plan.spec:
        yield f"start: {plan.starts or 'unknown'}"
    if text := cost(plan):
        yield f"cost: {text}"
