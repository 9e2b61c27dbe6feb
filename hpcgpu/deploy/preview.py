"""Plan a launch, a local run or a batch job; nothing is started."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.config import entry_points
from hpcgpu.config.sites.node_topology import topology_of
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy import start
from hpcgpu.deploy.doctor import probes
from hpcgpu.deploy.jobs.planned_job import read_job
from hpcgpu.deploy.machine import named, read_machine, this_machine
from hpcgpu.deploy.processes.node import read_node
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import ConfigError, SubmitError, opt, plain
from hpcgpu.host import limits
from hpcgpu.host import run as programs
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Command, HostMemory, JobSpec, Layout, Settings, Site, Topology
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.workers import facts_from, plan_whole_node
from hpcgpu.plan.jobs.request import gpus_per_node
from hpcgpu.report.job import Preview, described, differences, layout_of
from hpcgpu.report.machine import MachinePlan
from hpcgpu.units import counted

_UNKNOWN = f"the nodes are unknown: give --from FILE (from lstopo --of xml on one of them), or a known {opt('site')}"


def plan(
    options: Mapping[str, object],
    options_from: str,
    script: tuple[str, ...] = (),
    batch: str | None = None,
    file: str | None = None,  # XML of a node, in place of the site's
    *,
    ask: bool = True,  # the batch system, for its queues, nodes and the expected start
) -> Preview:
    """Plan for a script and its arguments, or for a cluster object; raise ConfigError for wrong settings.

    In a job, or with a launcher: what ``hpcgpu launch`` would start. Elsewhere, with a batch system: the job that would
    be submitted; without one: what ``hpcgpu run`` would start. ``batch``, ``file`` and options of a request plan a
    submission anywhere.
    """
    is_submission = batch or file is not None or options.keys() & entry_points.unused(entry_points.LAUNCH).keys()
    if not is_submission and (read_allocation(os.environ).batch != "local" or "launcher" in options):
        read, line = start.launch_line(options, options_from, script)
        return _of_node(read, line, layout_of(read.settings, *start.nodes_and_gpus(read.settings)))
    if not is_submission and not all_settings.read(options, options_from, "").batch:
        read = start.read_rank(options, options_from)
        alone = layout_of(replace(read.settings, ranks="node"), 1, start.nodes_and_gpus(read.settings)[1])
        return _of_node(read, shlex.join(start.run_argv(options, script)), alone)
    user, spec, system = read_job(options, options_from, script, batch, live=ask)
    text = system.script(spec)
    return of_job(user, spec, text, file, _starts(system, text) if ask else "")


def of_job(
    planned: Wanted,
    spec: JobSpec,
    script: str,
    file: str | None = None,
    starts: str = "",
    *,
    has_scheduler: bool = True,
) -> Preview:
    """Plan a job whose request exists already."""
    settings, site = planned.settings, planned.site
    topology, node_from = _machine(settings, site, file)
    node = _planned_node(settings, spec, topology, node_from) if topology else None
    return Preview(
        settings=settings,
        spec=spec,
        script=script,
        site=site,
        layout=layout_of(settings, spec.nodes, gpus_per_node(settings), has_scheduler=has_scheduler),
        node=node,
        node_from=node_from,
        starts=starts,
        limits=limits.read(),
        imports=probes.imports_of(settings, spec.nodes),
        has_scheduler=has_scheduler,
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


def _machine(settings: Settings, site: Site | None, file: str | None) -> tuple[Topology | None, str]:
    """Return a node of the job, and the source of its description."""
    if file is not None:
        return read_machine(file), f"as {named(file)} describes it"
    node = site.node(settings.queue) if site else None
    if not site or not node:
        return None, plain(_UNKNOWN)
    try:
        return topology_of(node), f"as documents describe it ({site.cited(node)}); live nodes are planned anew"
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
        facts = replace(facts, memory=HostMemory(spec.memory_per_node_bytes, plain(opt("memory"))))
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


def _of_node(read: Wanted, line: str, layout: Layout) -> Preview:
    settings = read.settings
    gpus = read_node(settings, os.environ).gpus[: settings.gpus_per_node]
    facts = this_machine(settings)
    return Preview(
        settings=settings,
        spec=None,
        granted=granted(),
        script=line,
        site=read.site,
        layout=layout,
        node=MachinePlan(facts, plan_whole_node(settings, facts, gpus), settings),
        node_from=f"{facts.name}, as it is",
        limits=limits.read(),
        imports=probes.imports_of(settings, len(layout.nodes)),
    )


def granted() -> str:
    """Describe the job around this process."""
    allocation = read_allocation(os.environ)
    if allocation.batch == "local":
        return "no job: this machine alone"
    return f"job {allocation.job_id} of {allocation.batch}: {counted(allocation.node_count, 'node')}"
