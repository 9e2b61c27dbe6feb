"""Plan a launch, a local run, a batch job or a machine; nothing is started."""

from __future__ import annotations

import codecs
import json
import os
import select
import shlex
import shutil
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgpu.batch import BatchSystem
from hpcgpu.config import layers
from hpcgpu.config.sites.node_topology import topology_of
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy import start
from hpcgpu.deploy.doctor import probes
from hpcgpu.deploy.jobs.batch_client import read_job
from hpcgpu.deploy.processes.node import facts_of, gpus_of, read_node
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import ConfigError, ParseError, SubmitError
from hpcgpu.host import discover, limits, nvml
from hpcgpu.host import run as programs
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Command, CpuSet, Gpu, HostMemory, JobSpec, Layout, Settings, Site, Topology
from hpcgpu.model.allocation import JOB_MEMORY, JOB_NODES, parse_simulated
from hpcgpu.pictures.layout import render_svg
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.workers import NodeFacts, facts_from, plan_whole_node
from hpcgpu.plan.jobs.request import gpus_per_node
from hpcgpu.report.job import Preview, described, differences, layout_of
from hpcgpu.report.machine import MachinePlan, describe, format_gpu, node_differences
from hpcgpu.topology.hwloc_xml import MAX_BYTES, read_file
from hpcgpu.units import counted

_STDIN = "-"
_WRITER_S = 10.0
_EXPECTED = "expected the output of hpcgpu topo --json"
_UNKNOWN = "the nodes are unknown: give --from FILE (from lstopo --of xml on one of them), or a known site="


def svg(plan: MachinePlan) -> str:
    """Return a plan as SVG."""
    bindings, names = [s.binding for s in plan.specs], [s.name for s in plan.specs]
    return render_svg(plan.facts.topology, bindings, names, plan.settings.nics)


def plan_machine(
    options: Mapping[str, object],
    options_from: str,
    *,
    file: str | None = None,  # hwloc's or NCCL's XML of another machine, - for stdin; None: this machine
    cpuset: str | None = None,  # PUs as a list, 0-7,16; None: all that this process may use
    gpus: str | None = None,  # sim:4, or positions, PCI addresses or UUIDs with commas between; None: all of NVIDIA
    workers: int | None = None,  # the first so many GPUs, or a multiple of all; None: one for each GPU
) -> MachinePlan:
    """Plan the workers of a machine; raise ConfigError or ParseError for a wrong PU, GPU, port or file."""
    settings = all_settings.read(options, options_from).settings
    facts = this_machine(settings) if file is None else facts_from(read_machine(file), named(file))
    if cpuset is not None:
        facts = replace(facts, allowed=_cpuset(cpuset, facts))
    chosen = _gpus(gpus or (settings.gpus if file is None else None), facts)
    if chosen:
        chosen, each = _for_workers(workers, chosen, settings)
        settings = replace(settings, workers_per_gpu=each)
    specs = plan_whole_node(settings, facts, chosen) if chosen else ()
    return MachinePlan(facts, specs, settings, named(file or ""))


def this_machine(settings: Settings) -> NodeFacts:
    """Return the facts of this node, with the part that this process may use."""
    host, allocation, topology = socket.gethostname(), read_allocation(os.environ), discover.topology()
    # on one of several nodes the process that starts this one tells it: the batch system is asked once for all
    more = () if {JOB_MEMORY, JOB_NODES} & os.environ.keys() else start.memory_env(settings, allocation)
    # without a driver that answers, no GPU can be said to be granted or not: the plan is for all of them
    granted = gpus_of(replace(settings, gpus=None), topology, os.environ, host) if nvml.read().gpus else ()
    return facts_of(host, topology, granted, {**os.environ, **dict(more)})


def _cpuset(text: str, facts: NodeFacts) -> CpuSet:
    try:
        cpuset = CpuSet.parse(text)
    except ValueError as e:
        raise ConfigError(f"--cpuset {text!r} is not a list of PUs; allowed: such as 0-7,16") from e
    if cpuset and cpuset <= facts.allowed:
        return cpuset
    missing = f"PUs {CpuSet(cpuset - facts.allowed)}" if cpuset else "nothing"
    raise ConfigError(f"--cpuset {text!r} names {missing}; there are PUs {facts.allowed} to plan with")


def _gpus(text: str | None, facts: NodeFacts) -> tuple[Gpu, ...]:
    """Return the GPUs of a list; positions count the GPUs that can run workers, as CUDA does, here those granted."""
    topology = facts.topology
    usable = facts.gpus or tuple(g for g in topology.gpus if g.can_run)
    if text is None:
        return usable
    if text.startswith("sim"):
        simulated = parse_simulated(text)
        return simulated_gpus(topology, simulated.per_node, simulated.memory_bytes, "this")
    out = []
    for name in (part.strip().lower() for part in text.split(",")):
        matches = [g for i, g in enumerate(usable) if name and name in (str(i), g.pci, g.uuid.lower())]
        if not matches:
            other = next((g for g in topology.gpus if name and name in (g.pci, g.uuid.lower())), None)
            reason = "not granted" if other and other.can_run else "and workers run on NVIDIA's"
            why = f"{format_gpu(other, address=False)}, {reason}" if other else "not there"
            shown = ", ".join(f"{i} at {g.pci}" for i, g in enumerate(usable)) or "none"
            raise ConfigError(f"--gpus names {name!r}, which is {why}; there are: {shown}; or simulated GPUs: sim:4")
        out += matches
    return tuple(out)


def _for_workers(count: int | None, gpus: tuple[Gpu, ...], settings: Settings) -> tuple[tuple[Gpu, ...], int]:
    """Return GPUs, and the number of workers on each, that make ``count`` workers."""
    if count is None:
        return gpus, settings.workers_per_gpu
    if 1 <= count <= len(gpus):
        return gpus[:count], 1
    if count < 1 or count % len(gpus):
        raise ConfigError(
            f"--workers {count} on {len(gpus)} GPUs; allowed: 1 to {len(gpus)}, or a multiple of {len(gpus)} for "
            "several on each"
        )
    return gpus, count // len(gpus)


def read_machine(name: str) -> Topology:
    """Read the machine of an XML file (``-``: stdin); raise ConfigError, or ParseError with the place in the file."""
    return _parse_topology(read_text(name), named(name))


def named(name: str) -> str:
    """Return a file's name in messages."""
    return "stdin" if name == _STDIN else name


def _parse_topology(text: str, where: str) -> Topology:
    try:
        return read_file(text)
    except ParseError as e:
        raise ParseError(f"{where}: {e}", evidence=e.evidence) from e


def read_text(name: str) -> str:
    """Read a file, or its beginning if it is longer than any topology."""
    try:
        if name == _STDIN:
            return _decoded(sys.stdin.buffer.read(MAX_BYTES + 1))
        # Without O_NONBLOCK, a FIFO without a writer keeps open() waiting for ever.
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not select.select([file], [], [], _WRITER_S)[0]:
                raise ConfigError(f"{name} is a FIFO to which nothing was written for {_WRITER_S:.0f} s; give a file")
            os.set_blocking(file.fileno(), True)
            return _decoded(file.read(MAX_BYTES + 1))
    except OSError as e:
        give = "give an XML file (lstopo --disallowed --of xml machine.xml)"
        raise ConfigError(f"{name} cannot be read: {e.strerror}; {give}") from e


def _decoded(content: bytes) -> str:
    """Decode a file: UTF-16 if it has its mark, as PowerShell's ``>`` writes it, else UTF-8."""
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8"
    return content.decode(encoding, "replace")


def compare_files(files: Sequence[str]) -> tuple[str, ...]:
    """Return where the machines of two files differ; raise ConfigError or ParseError for a wrong file."""
    if len(files) != 2 or files[0] == files[1]:
        twice = f"{files[0]} twice" if len(files) == 2 else " ".join(files) or "none"
        raise ConfigError(
            f"--diff compares two files, and got {twice}; write them by hpcgpu topo --json > "
            "node1.json on one node (srun -w node1 -N1 hpcgpu topo --json), and likewise on the other"
        )
    return node_differences(*map(_read_described, files))


def _read_described(name: str) -> dict[str, Any]:
    """Describe the machine of an XML file, or of the output of ``hpcgpu topo --json``."""
    text, where = read_text(name), named(name)
    if not text.lstrip().startswith("{"):
        return describe(_parse_topology(text, where), ())
    try:
        node = json.loads(text)
        node_differences(node, node)
    except json.JSONDecodeError as e:
        raise ConfigError(f"{where}, line {e.lineno}: no JSON ({e.msg}); {_EXPECTED}") from e
    except KeyError as e:
        raise ConfigError(f"{where} lacks the key {e.args[0]!r}; {_EXPECTED}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{where} has a value of a wrong type; {_EXPECTED}") from e
    return dict(node)


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
    is_submission = batch or file is not None or options.keys() & layers.unused(layers.LAUNCH).keys()
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


def of_job(planned: Wanted, spec: JobSpec, script: str, file: str | None = None, starts: str = "") -> Preview:
    """Plan a job whose request exists already."""
    settings, site = planned.settings, planned.site
    topology, node_from = _machine(settings, site, file)
    node = _planned_node(settings, spec, topology, node_from) if topology else None
    return Preview(
        settings=settings,
        spec=spec,
        script=script,
        site=site,
        layout=layout_of(settings, spec.nodes, gpus_per_node(settings)),
        node=node,
        node_from=node_from,
        starts=starts,
        limits=limits.read(),
        imports=probes.imports_of(settings, spec.nodes),
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
        return None, _UNKNOWN
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
