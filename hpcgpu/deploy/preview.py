"""Plan a job before its submission, or the ranks of this job before their start: nothing is submitted or started."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgpu.batch import BatchSystem
from hpcgpu.config import entry_points
from hpcgpu.config.sites.machine import topology_of
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy import start, topo
from hpcgpu.deploy.jobs.submitter import read_job
from hpcgpu.deploy.processes.node import Machine
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.host import run as programs
from hpcgpu.launch import read_allocation
from hpcgpu.model import Command, HostMemory, JobSpec, Layout, Settings, Site, Topology
from hpcgpu.model.limit import Limit
from hpcgpu.model.settings import options as all_options
from hpcgpu.model.settings import user_name
from hpcgpu.plan.binding import simulated_gpus
from hpcgpu.plan.binding.workers import facts_from, plan_whole_node
from hpcgpu.plan.jobs.request import gpus_per_node
from hpcgpu.report.job import Preview, described, differences, layout_of
from hpcgpu.report.machine import MachinePlan
from hpcgpu.units import counted, format_bytes, format_duration

_UNKNOWN = "the nodes are unknown: give --from FILE (from lstopo --of xml on one of them), or a known site="


Described = tuple[Topology, str]  # a node, and the file that describes it


def plan(
    options: Mapping[str, object],
    options_from: str,
    script: tuple[str, ...] = (),
    batch: str | None = None,
    machine: Described | None = None,
    *,
    ask: bool = True,
) -> Preview:
    """Plan for a script and its arguments, or for a cluster object; raise ConfigError for wrong settings.

    In a job, or with a launcher: what ``hpcgpu launch`` would start. Elsewhere, with a batch system: the job that would
    be submitted; without one: what ``hpcgpu run`` would start. ``batch``, ``machine`` and options of a request plan a
    submission anywhere.
    ``machine`` describes a node in place of the site's. ``ask`` queries the batch system for its queues, nodes and the
    expected start, where that needs no submission.
    """
    submits = batch or machine or options.keys() & entry_points.unused(entry_points.LAUNCH).keys()
    if not submits and (read_allocation(os.environ).batch != "local" or "launcher" in options):
        return of_launch(options, options_from, script)
    if not submits and not all_settings.read(options, options_from, "").batch:
        return of_run(options, options_from, script)
    user, spec, system = read_job(options, options_from, script, batch, live=ask)
    text = system.script(spec)
    return of_job(user, spec, text, machine, _starts(system, text) if ask else "")


def of_job(planned: Wanted, spec: JobSpec, script: str, machine: Described | None = None, starts: str = "") -> Preview:
    """Plan a job whose request exists already."""
    settings, site = planned.settings, planned.site
    topology, node_from = _machine(settings, site, machine)
    node = _planned_node(settings, spec, topology, node_from) if topology else None
    return Preview(
        settings=settings,
        values=changed_settings(settings),
        spec=spec,
        script=script,
        site=site,
        layout=layout_of(settings, spec.nodes, gpus_per_node(settings)),
        node=node,
        node_from=node_from,
        starts=starts,
    )


def changed_settings(settings: Settings) -> tuple[tuple[str, str, str], ...]:
    """Return name, value and place of each setting that is not a default."""
    return tuple(
        (name, _format(option.name, getattr(settings, option.name)), where)
        for option in all_options()
        if (where := settings.where(name := user_name(option))) != "default"
    )


def compare(path: str, plan: Preview) -> tuple[str, ...]:
    """Return where a plan differs from one written by ``hpcgpu plan --json``; raise ConfigError for another file."""
    try:
        before = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--diff {path} cannot be read: {error}; write one: hpcgpu plan --json > {path}") from error
    if not isinstance(before, dict) or "request" not in before:
        raise ConfigError(f"--diff {path} is no plan; write one: hpcgpu plan --json > {path}")
    return differences(before, json.loads(json.dumps(described(plan))))


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


def _machine(settings: Settings, site: Site | None, machine: Described | None) -> tuple[Topology | None, str]:
    """Return a node of the job, and the source of its description."""
    if machine is not None:
        return machine[0], f"as {machine[1]} describes it"
    node = site.node(settings.queue) if site else None
    if not site or not node:
        return None, _UNKNOWN
    try:
        source = site.cited(node.source, *site.path_of(node))
        return topology_of(node), f"as documents describe it ({source}); live nodes are planned anew"
    except ConfigError as error:
        return None, f"{site.name}: {error}; give --from FILE (from lstopo --of xml on one of the nodes)"


def _planned_node(settings: Settings, spec: JobSpec, topology: Topology, where: str) -> MachinePlan:
    """Plan the workers of a whole node: the job's part is unknown before it starts."""
    count = gpus_per_node(settings)
    if settings.gpus:
        gpus = simulated_gpus(topology, count, 1 << 30, "node")
    else:
        gpus = tuple(gpu for gpu in topology.gpus if gpu.can_run)[:count]
    facts = facts_from(topology, where)
    if spec.memory_per_node_bytes:
        facts = replace(facts, memory=HostMemory(spec.memory_per_node_bytes, "memory="))
    return MachinePlan(facts, plan_whole_node(settings, facts, gpus), settings)


def _starts(system: BatchSystem, script: str) -> str:
    """Ask the batch system when a job would start; nothing is submitted."""
    command: Command | None = system.test(script)
    if command is None or not shutil.which(command.argv[0]):
        return ""
    try:
        return f"about {system.read_test(programs.run_sync(command))}, as {command.argv[0]} expects now"
    except SubmitError as error:
        return str(error)


def of_launch(options: Mapping[str, object], options_from: str, script: tuple[str, ...]) -> Preview:
    """Plan the ranks of ``hpcgpu launch`` in this allocation; raises as the launch does."""
    read, line = start.launch_line(options, options_from, script)
    nodes, gpus = start.nodes_and_gpus(read.settings)
    return _of_node(read, line, layout_of(read.settings, nodes, gpus))


def of_run(options: Mapping[str, object], options_from: str, script: tuple[str, ...]) -> Preview:
    """Plan ``hpcgpu run`` as one process; raises as the run does."""
    read = start.read_rank(options, options_from)
    alone = replace(read.settings, ranks="node")
    return _of_node(read, shlex.join(script), layout_of(alone, 1, start.nodes_and_gpus(read.settings)[1]))


def _of_node(read: Wanted, line: str, layout: Layout) -> Preview:
    settings = read.settings
    gpus = Machine.read(settings, os.environ).gpus[: settings.gpus_per_node]
    facts = topo.this_machine(settings)
    return Preview(
        settings=settings,
        values=changed_settings(settings),
        spec=None,
        granted=granted(),
        script=line,
        site=read.site,
        layout=layout,
        node=MachinePlan(facts, plan_whole_node(settings, facts, gpus), settings),
        node_from=f"{facts.name}, as it is",
    )


def granted() -> str:
    """Describe the job around this process."""
    allocation = read_allocation(os.environ)
    if allocation.batch == "local":
        return "no job: this machine alone"
    return f"job {allocation.job_id} of {allocation.batch}: {counted(allocation.node_count, 'node')}"
