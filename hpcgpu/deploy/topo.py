"""The plan of a machine, this one or one that a file describes, and the differences between machines."""

from __future__ import annotations

import base64
import binascii
import json
import os
import secrets
import select
import socket
import stat
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcgpu.deploy import settings as read_settings
from hpcgpu.deploy import start
from hpcgpu.deploy.processes.node import facts_of
from hpcgpu.errors import ConfigError, LaunchError, ParseError
from hpcgpu.host import cgroup, discover, process
from hpcgpu.host import run as programs
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Command, CpuSet, Gpu, Settings, Topology, WorkerSpec
from hpcgpu.model.allocation import JOB_MEMORY, JOB_NODES
from hpcgpu.model.simulated import parse_simulated
from hpcgpu.pictures.svg import render_svg
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.memory import plan_host_memory
from hpcgpu.plan.binding.workers import NodeFacts, facts_from, plan_whole_node
from hpcgpu.plan.views.describe import describe, differences
from hpcgpu.plan.views.explain import format_gpu
from hpcgpu.plan.views.overview import Plan, render_overview
from hpcgpu.topology import document

_STDIN = "-"
_WRITER_S = 10.0
_NODES_TIMEOUT_S = 120.0
_MARK = "hpcgpu-answer"
# srun passes a longer line on in pieces of 1,024 bytes, with other nodes' pieces between them (Slurm 22.05, seen with
# lines of 7 kB). Open MPI passes on as much as it finds, up to 4,096 bytes: a multiple of this.
LINE_BYTES = 512
_PAYLOAD = 448
_EXPECTED = "expected the output of hpcgpu topo --json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of a machine that is planned for."""

    file: str | None = None  # hwloc's or NCCL's XML of another machine, - for stdin; None: this machine
    cpuset: str | None = None  # PUs as a list, 0-7,16; None: all that this process may use
    gpus: str | None = None  # sim:4, or positions, PCI addresses or UUIDs with commas between; None: all of NVIDIA
    workers: int | None = None  # the first so many GPUs, or a multiple of all; None: one for each GPU


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """A machine and the workers planned on it."""

    facts: NodeFacts
    specs: tuple[WorkerSpec, ...]
    settings: Settings
    file: str = ""  # that describes the machine

    def table(self, width: int = 0) -> str:
        """Return the plan as text for a terminal of ``width`` columns; 0 for any width."""
        facts, settings = self.facts, self.settings
        plan = Plan(facts.topology, self.specs, facts.allowed, settings.nics, settings.reserved_cores)
        plan = plan._replace(allowed_nodes=facts.allowed_nodes, host=facts.name)
        return render_overview(plan, self.file, width)

    def described(self) -> dict[str, Any]:
        """Return the plan as plain data, with the PUs that were planned with and the PUs of no worker."""
        allowed = self.facts.allowed
        idle = CpuSet(allowed.difference(*(s.binding.cpuset for s in self.specs)))
        plain = describe(self.facts.topology, self.specs, self.facts.name, self.settings.nics)
        return {**plain, "allowed_cpuset": str(allowed), "idle_cpuset": str(idle)}

    def picture(self) -> str:
        """Return the plan as SVG."""
        return render_svg(self.facts.topology, [s.binding for s in self.specs], [s.name for s in self.specs])


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
    memory = plan_host_memory(cgroup.memory_limit(), allocation)
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
        return document.read(text)
    except ParseError as e:
        raise ParseError(f"{where}: {e}", evidence=e.evidence) from e


def read_text(name: str) -> str:
    """Read a file, or its beginning if it is longer than any topology."""
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


def compare(files: Sequence[str]) -> tuple[str, bool]:
    """Compare the machines of files, or this job's nodes; return the differences, and True if there are any.

    Raises ConfigError for one machine only, ParseError for a wrong file, LaunchError if the nodes do not answer.
    """
    if twice := next((name for name in files if files.count(name) > 1), ""):
        raise ConfigError(f"--diff compares machines, and {named(twice)} was given twice; give a file of each machine")
    nodes = {named(name): _read_described(name) for name in files} if files else _nodes_of_the_job()
    if len(nodes) < 2:
        raise ConfigError(
            f"--diff compares machines, but it has {len(nodes)}: start it in a job with several nodes, or give files "
            "(hpcgpu topo --json > node.json on each)"
        )
    lines = differences(nodes)
    count = f"{len(lines)} difference{'' if len(lines) == 1 else 's'}" if lines else "all alike"
    return "\n".join([*lines, f"{len(nodes)} nodes, {count}", ""]), bool(lines)


def _nodes_of_the_job() -> dict[str, dict[str, Any]]:
    command = start.node_launch(process.python_argv("hpcgpu", "topo", "--answer"))
    argv = " ".join(command.argv)
    done = programs.run_sync(Command(command.argv, env=dict(command.env), timeout_s=_NODES_TIMEOUT_S))
    if done.returncode != 0:
        raise LaunchError(f"{argv} ended with {done.returncode}: {done.stderr.strip()}")
    try:
        nodes = [_parse_described(text, "a node's answer") for text in read_answers(done.stdout.splitlines())]
    except ValueError as e:
        raise LaunchError(f"{argv}: {e}; it printed: {done.stdout[-2000:]}") from e
    return dict(sorted((node["machine"]["host"], node) for node in nodes))  # nodes answer in any order


def _read_described(name: str) -> dict[str, Any]:
    text = read_text(name)
    if text.lstrip().startswith("{"):
        return _parse_described(text, named(name))
    return describe(_parse_topology(text, name), ())


def _parse_described(text: str, where: str) -> dict[str, Any]:
    """Parse the output of ``hpcgpu topo --json``; raise ConfigError for another text."""
    try:
        node = json.loads(text)
        differences({"a": node, "b": node})
    except json.JSONDecodeError as e:
        raise ConfigError(f"{where}, line {e.lineno}: no JSON ({e.msg}); {_EXPECTED}") from e
    except KeyError as e:
        raise ConfigError(f"{where} lacks the key {e.args[0]!r}; {_EXPECTED}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{where} has a value of a wrong type; {_EXPECTED}") from e
    return dict(node)


def answer_lines(text: str) -> list[str]:
    """Encode a text as lines of ``LINE_BYTES`` each, with their line ends; write each by one call."""
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    pieces = [packed[i : i + _PAYLOAD] for i in range(0, len(packed), _PAYLOAD)]
    head = f"{_MARK} {secrets.token_hex(8)}"
    return [f"{f'{head} {i} {len(pieces)} {piece}':<{LINE_BYTES - 1}}\n" for i, piece in enumerate(pieces)]


def read_answers(stream: Iterable[str]) -> list[str]:
    """Decode the texts whose lines are in a stream, in any order, among other lines; ValueError if lines are lost."""
    texts: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for line in stream:
        if line.startswith(_MARK + " "):
            _, name, number, count, piece = line.split()
            texts.setdefault(name, {})[int(number)] = piece
            counts[name] = int(count)
    for name, pieces in texts.items():
        if len(pieces) != counts[name]:
            raise ValueError(f"of {counts[name]} lines of an answer {len(pieces)} have come")
    joined = ("".join(pieces[i] for i in range(len(pieces))) for pieces in texts.values())
    try:
        return [zlib.decompress(base64.b64decode(text, validate=True)).decode() for text in joined]
    except (KeyError, binascii.Error, zlib.error) as e:
        raise ValueError(f"an answer has changed on its way ({e})") from e
