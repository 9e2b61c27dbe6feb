"""Plan ``hpcgpu run`` and ``hpcgpu launch`` for this node as it is, without a start."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace

from hpcgpu.config import entry_points
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy import start, topo
from hpcgpu.deploy.jobs.preview import changed_settings
from hpcgpu.deploy.processes.node import Machine
from hpcgpu.deploy.settings import Wanted
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Layout
from hpcgpu.plan.binding.workers import plan_whole_node
from hpcgpu.report.job import Preview, layout_of
from hpcgpu.report.machine import Plan
from hpcgpu.units import counted


def launch(options: Mapping[str, object], options_from: str, typed: tuple[str, ...]) -> Preview:
    """Return the plan of ``hpcgpu launch`` with ``typed`` for each rank's ``hpcgpu run``; raises as the launch does."""
    read, line = start.launch_line(options, options_from, typed)
    nodes, gpus = start.nodes_and_gpus(read.settings)
    return _preview(read, line, layout_of(read.settings, nodes, gpus))


def run(options: Mapping[str, object], options_from: str, script: tuple[str, ...]) -> Preview:
    """Return the plan of ``hpcgpu run`` as one process, or as one of a launcher's ranks; raises as the run itself."""
    read = all_settings.read(options, options_from, entry_point=entry_points.RUN)
    if read_allocation(os.environ).rank.size > 1:
        return _preview(read, shlex.join(script), None)
    alone = replace(read.settings, ranks="node")
    return _preview(read, shlex.join(script), layout_of(alone, 1, start.nodes_and_gpus(read.settings)[1]))


def _preview(read: Wanted, line: str, layout: Layout | None) -> Preview:
    settings = read.settings
    gpus = Machine.read(settings, os.environ).gpus[: settings.gpus_per_node]
    facts = topo.this_machine(settings)
    specs = plan_whole_node(settings, facts, gpus)
    node = Plan(facts.topology, specs, facts.allowed, settings.nics, settings.reserved_cores, facts.allowed_nodes)
    return Preview(
        settings=settings,
        values=changed_settings(settings),
        spec=None,
        granted=tuple(_granted()),
        script=line,
        site=read.site,
        layout=layout,
        node=node,
        node_from=f"{facts.name}, as it is",
    )


def _granted() -> tuple[str, ...]:
    """Describe the job around this process."""
    allocation = read_allocation(os.environ)
    job = "no job: this machine alone"
    if allocation.batch != "local":
        job = f"job {allocation.job_id} of {allocation.batch}: {counted(allocation.node_count, 'node')}"
    rank = allocation.rank
    ranks = f"{counted(rank.size, 'rank')} of {rank.launcher}: they divide the work when they meet"
    return (job, *([ranks] if rank.size > 1 else []))
