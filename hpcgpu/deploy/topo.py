"""The plan of a machine, this one or one that a file describes, and the differences between two machines."""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcgpu.deploy import settings as read_settings
from hpcgpu.deploy import start
from hpcgpu.deploy.processes.node import facts_of
from hpcgpu.errors import ConfigError, ParseError
from hpcgpu.host import discover, host_memory
from hpcgpu.launch import read_allocation
from hpcgpu.model import CpuSet, Gpu, Settings, Topology
from hpcgpu.model.allocation import JOB_MEMORY, JOB_NODES, parse_simulated
from hpcgpu.pictures.svg import render_svg
from hpcgpu.plan.binding import simulated_gpus
from hpcgpu.plan.binding.memory import plan_host_memory
from hpcgpu.plan.binding.workers import NodeFacts, facts_from, plan_whole_node
from hpcgpu.report.machine import MachinePlan, describe, format_gpu, node_differences
from hpcgpu.topology.hwloc_xml import MAX_BYTES, read_file

_STDIN = "-"
_WRITER_S = 10.0
_EXPECTED = "expected the output of hpcgpu topo --json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a machine that is planned for."""

    file: str | None = None  # hwloc's or NCCL's XML of another machine, - for stdin; None: this machine
    cpuset: str | None = None  # PUs as a list, 0-7,16; None: all that this process may use
    gpus: str | None = None  # sim:4, or positions, PCI addresses or UUIDs with commas between; None: all of NVIDIA
    workers: int | None = None  # the first so many GPUs, or a multiple of all; None: one for each GPU


def svg(plan: MachinePlan) -> str:
    """Return a plan as SVG."""
    return render_svg(plan.facts.topology, [s.binding for s in plan.specs], [s.name for s in plan.specs])


def plan(selection: Selection, options: Mapping[str, object], options_from: str) -> MachinePlan:
    """Plan the workers of a machine; raise ConfigError or ParseError for a wrong PU, GPU, port or file."""
    settings = read_settings.read(options, options_from).settings
    if selection.file is None:
        facts, file = this_machine(settings), ""
    else:
        file = named(selection.file)
        facts = facts_from(read_machine(selection.file), file)
    if selection.cpuset is not None:
        facts = replace(facts, allowed=_cpuset(selection.cpuset, facts))
    gpus = _gpus(selection.gpus or (settings.gpus if selection.file is None else None), facts.topology)
    if not gpus:
        return MachinePlan(facts, (), settings, file)
    gpus, each = _for_workers(selection.workers, gpus, settings)
    settings = replace(settings, workers_per_gpu=each)
    return MachinePlan(facts, plan_whole_node(settings, facts, gpus), settings, file)


def this_machine(settings: Settings) -> NodeFacts:
    """Return the facts of this node, with the part that this process may use."""
    host, allocation = socket.gethostname(), read_allocation(os.environ)
    # on one of several nodes the process that starts this one tells it: the batch system is asked once for all
    more = () if {JOB_MEMORY, JOB_NODES} & os.environ.keys() else start.memory_env(settings, allocation)
    allocation = read_allocation({**os.environ, **dict(more)}, host)
    memory = plan_host_memory(host_memory.memory_limit(), allocation)
    return facts_of(host, discover.topology(), memory, os.environ, in_job=allocation.batch != "local")


def _cpuset(text: str, facts: NodeFacts) -> CpuSet:
    try:
        cpuset = CpuSet.parse(text)
    except ValueError as e:
        raise ConfigError(f"--cpuset {text!r} is not a list of PUs; allowed: such as 0-7,16") from e
    if not cpuset or (outside := CpuSet(cpuset - facts.allowed)):
        missing = f"PUs {outside}" if cpuset else "nothing"
        raise ConfigError(f"--cpuset {text!r} names {missing}; there are PUs {facts.allowed} to plan with")
    return cpuset


def _gpus(text: str | None, topology: Topology) -> tuple[Gpu, ...]:
    """Return the GPUs of a list; positions count the GPUs that can run workers, as CUDA does."""
    usable = tuple(g for g in topology.gpus if g.can_run)
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
            why = f"{format_gpu(other, address=False)}, and workers run on NVIDIA's" if other else "not there"
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
            return sys.stdin.buffer.read(MAX_BYTES + 1).decode("utf-8", "replace")
        # Without O_NONBLOCK, a FIFO without a writer keeps open() waiting for ever.
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not select.select([file], [], [], _WRITER_S)[0]:
                raise ConfigError(f"{name} is a FIFO to which nothing was written for {_WRITER_S:.0f} s; give a file")
            os.set_blocking(file.fileno(), True)
            return file.read(MAX_BYTES + 1).decode("utf-8", "replace")
    except OSError as e:
        raise ConfigError(
            f"{name} cannot be read: {e.strerror}; give an XML file (lstopo --disallowed --of xml machine.xml)"
        ) from e


def compare(files: Sequence[str]) -> tuple[str, ...]:
    """Return where the machines of two files differ; raise ConfigError or ParseError for a wrong file."""
    if len(files) != 2 or files[0] == files[1]:
        raise ConfigError(
            f"--diff compares two files, and got {' '.join(files) or 'none'}; write them by hpcgpu topo --json > "
            "node1.json on one node (srun -w node1 -N1 hpcgpu topo --json), and likewise on the other"
        )
    return node_differences(*map(_read_described, files))


def _read_described(name: str) -> dict[str, Any]:
    text = read_text(name)
    if text.lstrip().startswith("{"):
        return _parse_described(text, named(name))
    return describe(_parse_topology(text, name), ())


def _parse_described(text: str, where: str) -> dict[str, Any]:
    """Parse the output of ``hpcgpu topo --json``; raise ConfigError for another text."""
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
