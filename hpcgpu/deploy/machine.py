"""Plan the workers of a machine, this one or that of a file; compare two. Nothing is started."""

from __future__ import annotations

import codecs
import json
import os
import select
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy import start
from hpcgpu.deploy.processes.node import facts_of, gpus_of
from hpcgpu.errors import ConfigError, ParseError
from hpcgpu.host import discover, nvml
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import CpuSet, Gpu, Settings, Topology
from hpcgpu.model.allocation import JOB_MEMORY, JOB_NODES, parse_simulated
from hpcgpu.pictures.layout import render_svg
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.workers import NodeFacts, facts_from, plan_whole_node
from hpcgpu.report.machine import MachinePlan, describe, format_gpu, node_differences
from hpcgpu.topology.hwloc_xml import MAX_BYTES, read_file

_STDIN = "-"
_WRITER_S = 10.0
_EXPECTED = "expected the output of hpcgpu topo --json"


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
