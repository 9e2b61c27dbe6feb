"""The plan of a machine: this one, or one that a file describes."""

from __future__ import annotations

import os
import select
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy import start
from hpcgpu.deploy.processes.node import facts_of
from hpcgpu.errors import ConfigError, ParseError
from hpcgpu.host import cgroup, discover
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import CpuSet, Gpu, Settings, Topology, WorkerSpec
from hpcgpu.model.allocation import JOB_MEMORY, JOB_NODES
from hpcgpu.model.simulated import parse_simulated
from hpcgpu.pictures.svg import render_svg
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.memory import plan_host_memory
from hpcgpu.plan.binding.whole_node import facts_from, plan_whole_node
from hpcgpu.plan.binding.workers import NodeFacts
from hpcgpu.plan.views.describe import describe
from hpcgpu.plan.views.explain import format_gpu
from hpcgpu.plan.views.overview import Plan, render_overview
from hpcgpu.topology import document

_STDIN = "-"
_WRITER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a machine that is planned for.

    Attributes
    ----------
    file : str, optional
        hwloc's or NCCL's XML of a machine elsewhere, with what the process that wrote it might use; ``-`` for stdin.
        None: this machine, with what this process may use.
    cpuset : str, optional
        PUs as a list (``0-7,16``); all that may be used if not given.
    gpus : str, optional
        ``sim:4``, or GPUs by position, PCI address or UUID, with commas between; all NVIDIA's if not given.
    workers : int, optional
        How many workers: the first so many GPUs, or a multiple of all; one for each GPU if not given.

    """

    file: str | None = None
    cpuset: str | None = None
    gpus: str | None = None
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """A machine, the workers planned on it, and the file that describes it, if there is one."""

    facts: NodeFacts
    specs: tuple[WorkerSpec, ...]
    settings: Settings
    file: str = ""

    def table(self, width: int = 0) -> str:
        """Return the plan for people; ``width`` is that of their terminal, 0 as wide as it takes."""
        facts, wanted = self.facts, self.settings
        shown = Plan(facts.topology, self.specs, facts.allowed, wanted.nics, wanted.reserved_cores)
        shown = shown._replace(allowed_nodes=facts.allowed_nodes, host=facts.name)
        return render_overview(shown, self.file, width)

    def described(self) -> dict[str, Any]:
        """Return the plan as plain data, with the PUs that were planned with, and those that no worker has."""
        allowed = self.facts.allowed
        idle = CpuSet(allowed.difference(*(s.binding.cpuset for s in self.specs)))
        found = describe(self.facts.topology, self.specs, self.facts.name, self.settings.nics)
        return {**found, "allowed_cpuset": str(allowed), "idle_cpuset": str(idle)}

    def picture(self) -> str:
        """Return the plan as SVG."""
        return render_svg(self.facts.topology, [s.binding for s in self.specs], [s.name for s in self.specs])


def plan(selection: Selection, given: Mapping[str, object], given_from: str) -> MachinePlan:
    """Plan the workers of a machine.

    Raises
    ------
    ConfigError, ParseError
        A PU, GPU or port that is not there, with those that are; a file that is no topology.

    """
    wanted = wanted_settings.read(given, given_from).settings
    facts, file = (
        (this_machine(wanted), "") if selection.file is None else (_machine_of(selection.file), named(selection.file))
    )
    topology = facts.topology
    if selection.cpuset is not None:
        facts = replace(facts, allowed=_cpuset(selection.cpuset, facts))
    gpus = _gpus(selection.gpus or (wanted.gpus if selection.file is None else None), topology)
    if not gpus:
        return MachinePlan(facts, (), wanted, file)
    gpus, each = _for_workers(selection.workers, gpus, wanted)
    wanted = replace(wanted, workers_per_gpu=each)
    return MachinePlan(facts, plan_whole_node(wanted, facts, gpus), wanted, file)


def this_machine(wanted: Settings) -> NodeFacts:
    """Return this node, and what of it this process may use."""
    host, allocation = socket.gethostname(), read_allocation(os.environ)
    # on one of several nodes the process that starts this one tells it: the batch system is asked once for all
    more = () if {JOB_MEMORY, JOB_NODES} & os.environ.keys() else start.memory_env(wanted, allocation)
    allocation = read_allocation({**os.environ, **dict(more)}, host)
    memory = plan_host_memory(cgroup.memory_limit(), allocation)
    return facts_of(host, discover.topology(), memory, os.environ, in_job=allocation.batch != "local")


def _machine_of(name: str) -> NodeFacts:
    return facts_from(read_machine(name), named(name))


def _cpuset(text: str, facts: NodeFacts) -> CpuSet:
    try:
        wanted = CpuSet.parse(text)
    except ValueError as e:
        raise ConfigError(f"--cpuset {text!r} is no list of PUs; allowed: such as 0-7,16") from e
    if not wanted or (outside := CpuSet(wanted - facts.allowed)):
        missing = f"PUs {outside}" if wanted else "nothing"
        raise ConfigError(f"--cpuset {text!r} names {missing}; there are PUs {facts.allowed} to plan with")
    return wanted


def _gpus(text: str | None, topology: Topology) -> tuple[Gpu, ...]:
    """Return the GPUs of a list; positions count those that workers run on, as CUDA does."""
    there = tuple(g for g in topology.gpus if g.can_run)
    if text is None:
        return there
    if text.startswith("sim"):
        simulated = parse_simulated(text)
        return simulated_gpus(topology, simulated.per_node, simulated.memory_bytes, "this")
    out = []
    for word in (w.strip().lower() for w in text.split(",")):
        found = [g for i, g in enumerate(there) if word and word in (str(i), g.pci, g.uuid.lower())]
        if not found:
            other = next((g for g in topology.gpus if word and word in (g.pci, g.uuid.lower())), None)
            why = f"{format_gpu(other, address=False)}, and workers run on NVIDIA's" if other else "not there"
            named = ", ".join(f"{i} at {g.pci}" for i, g in enumerate(there)) or "none"
            raise ConfigError(f"--gpus names {word!r}, which is {why}; there are: {named}; or simulated ones: sim:4")
        out += found
    return tuple(out)


def _for_workers(count: int | None, gpus: tuple[Gpu, ...], wanted: Settings) -> tuple[tuple[Gpu, ...], int]:
    """Return GPUs, and the number of workers on each, that make so many workers."""
    if count is None:
        return gpus, wanted.workers_per_gpu
    if 1 <= count <= len(gpus):
        return gpus[:count], 1
    if count < 1 or count % len(gpus):
        raise ConfigError(
            f"--workers {count} on {len(gpus)} GPUs; allowed: 1 to {len(gpus)}, or a multiple of {len(gpus)} for "
            "several on each"
        )
    return gpus, count // len(gpus)


def read_machine(name: str) -> Topology:
    """Return the machine of an XML file; ``-`` is stdin.

    Raises
    ------
    ConfigError
        The file cannot be read.
    ParseError
        It is no topology; the message names the file and the place.

    """
    return parse_topology(read_text(name), named(name))


def named(name: str) -> str:
    """Return a file's name in messages."""
    return "stdin" if name == _STDIN else name


def parse_topology(text: str, where: str) -> Topology:
    """Return the machine that an XML text describes; errors begin with ``where``."""
    try:
        return document.read(text)
    except ParseError as e:
        raise ParseError(f"{where}: {e}", evidence=e.evidence) from e


def read_text(name: str) -> str:
    """Return a file's text, or its beginning where it is longer than any topology."""
    try:
        if name == _STDIN:
            return sys.stdin.buffer.read(document.MAX_BYTES + 1).decode("utf-8", "replace")
        # Without O_NONBLOCK, a FIFO without a writer keeps open() waiting for ever.
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not select.select([file], [], [], _WRITER_S)[0]:
                raise ConfigError(f"{name} is a FIFO to which nothing was written for {_WRITER_S:.0f} s; give a file")
            os.set_blocking(file.fileno(), True)
            return file.read(document.MAX_BYTES + 1).decode("utf-8", "replace")
    except OSError as e:
        raise ConfigError(
            f"{name} cannot be read: {e.strerror}; give an XML file (lstopo --disallowed --of xml machine.xml)"
        ) from e
