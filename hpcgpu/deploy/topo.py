"""What would be planned on a machine: this one, one that a file describes, or the nodes of this job."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy import start
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import addresses, cgroup, discover
from hpcgpu.host import run as programs
from hpcgpu.model import Command, CpuSet, Gpu, NodeLayout, Settings, Topology, WorkerSpec
from hpcgpu.model.simulated import parse_simulated
from hpcgpu.plan.binding import place_simulated
from hpcgpu.plan.describe import describe, differences, unused_ports
from hpcgpu.plan.explain import binding_table, render_table
from hpcgpu.plan.picture import render_svg
from hpcgpu.plan.ports import Ports, Why, label
from hpcgpu.plan.workers import NodeFacts, plan_workers
from hpcgpu.topology import document

_NODES_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of a machine is planned for.

    Attributes
    ----------
    file : str, optional
        hwloc's or NCCL's XML of a machine elsewhere; None: this machine, as this process may use it.
    cpuset : str, optional
        PUs as a list (``0-7,16``); all that may be used if not given.
    gpus : str, optional
        ``sim:4``, or GPUs by position, PCI address or UUID, with commas between; all if not given.
    workers : int, optional
        How many workers: the first so many GPUs, or a multiple of all; one for each GPU if not given.

    """

    file: str | None = None
    cpuset: str | None = None
    gpus: str | None = None
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A machine and the workers planned on it."""

    topology: Topology
    specs: tuple[WorkerSpec, ...]
    settings: Settings
    host: str

    def table(self) -> str:
        """Return the plan for people: where it was read, the workers, the ports that are not used."""
        lines = [f"read by {self.topology.source}", *(f"note: {w}" for w in self.topology.warnings)]
        if not self.specs:
            return "\n".join([*lines, "no GPU here; plan for some: hpcgpu topo --gpus sim:4", ""])
        whys: dict[Why, list[str]] = {}
        for nic, why in unused_ports(Ports(self.topology, self.settings.nics), self.specs):
            whys.setdefault(why, []).append(label(nic))
        unused = [
            f"not used: {', '.join(names)} ({why.many if len(names) > 1 else why.one})" for why, names in whys.items()
        ]
        return "\n".join([*lines, render_table(binding_table(self.specs)).rstrip("\n"), *unused, ""])

    def described(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return describe(self.topology, self.specs, self.host, self.settings.nics)

    def picture(self) -> str:
        """Return the plan as SVG."""
        return render_svg(self.topology, [s.binding for s in self.specs], [s.name for s in self.specs])


def plan(part: Part, given: Mapping[str, object], given_from: str) -> Planned:
    """Plan the workers of a machine.

    Raises
    ------
    ConfigError, ParseError
        A PU, GPU or port that is not there, with those that are; a file that is no topology.

    """
    wanted = wanted_settings.read(given, given_from).settings
    facts = _this_machine() if part.file is None else _machine_of(Path(part.file))
    topology = facts.topology
    if part.cpuset is not None:
        facts = replace(facts, allowed=_cpuset(part.cpuset, facts))
    gpus = _gpus(part.gpus or (wanted.gpus if part.file is None else None), topology)
    if not gpus:
        return Planned(topology, (), wanted, facts.name)
    gpus, each = _for_workers(part.workers, gpus, wanted)
    # a limit on memory would be refused where a GPU's size is unknown, and the plan shows none
    wanted = replace(wanted, workers_per_gpu=each, device_memory_limit=0)
    count = len(gpus) * each + wanted.cpu_workers
    everyone = NodeLayout(0, (0,), (tuple(range(count)),), wanted.cpu_workers)
    named = replace(facts, name="worker", gpus=gpus)
    return Planned(topology, tuple(s for _, s in plan_workers(wanted, named, everyone)), wanted, facts.name)


def _this_machine() -> NodeFacts:
    return NodeFacts(
        name=socket.gethostname(),
        topology=discover.topology(),
        gpus=(),
        allowed=cgroup.granted_cpus(),
        allowed_nodes=cgroup.granted_memory_nodes(),
        memory_bytes=cgroup.memory_limit_bytes(),
        environ=os.environ,
        scratch="",
        interfaces=addresses.usable_interfaces(),
    )


def _machine_of(path: Path) -> NodeFacts:
    topology = document.read(_text(path))
    return NodeFacts(
        name="",
        topology=topology,
        gpus=(),
        allowed=CpuSet(pu for core in topology.cores for pu in core),
        allowed_nodes=CpuSet(),
        memory_bytes=sum(n.memory_bytes for n in topology.numa_nodes) or 1,
        environ={},
        scratch="",
    )


def _text(path: Path) -> str:
    """Return a file's text, or its beginning where it is longer than any topology.

    Raises
    ------
    ConfigError
        It cannot be read.

    """
    try:
        with path.open("rb") as file:
            return file.read(document.MAX_BYTES + 1).decode("utf-8", "replace")
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}; give an XML file (lstopo --of xml machine.xml)") from e


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
    if text is None:
        return topology.gpus
    if text.startswith("sim"):
        simulated = parse_simulated(text)
        return place_simulated(topology, simulated.per_node, simulated.memory_bytes, "this")
    out = []
    for word in (w.strip() for w in text.split(",")):
        found = [g for i, g in enumerate(topology.gpus) if word and word.lower() in (str(i), g.pci, g.uuid.lower())]
        if not found:
            there = ", ".join(f"{i} at {g.pci}" for i, g in enumerate(topology.gpus)) or "none"
            raise ConfigError(
                f"--gpus names {word!r}, which is not there; there are: {there}; or simulated ones: sim:4"
            )
        out += found
    return tuple(out)


def _for_workers(count: int | None, gpus: tuple[Gpu, ...], wanted: Settings) -> tuple[tuple[Gpu, ...], int]:
    """Return the GPUs and the workers on each that make so many workers."""
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


def compare(files: Sequence[str]) -> str:
    """Return what differs between machines: those of files (XML, or JSON of ``hpcgpu topo``), or of this job's nodes.

    Raises
    ------
    ConfigError, ParseError, LaunchError
        One machine only, a file that cannot be read, or nodes that do not answer.

    """
    nodes = {name: _described(Path(name)) for name in files} if files else _nodes_of_the_job()
    if len(nodes) < 2:
        raise ConfigError(
            f"--diff compares machines, and there {'is one' if nodes else 'are none'}: start it in a job with several "
            "nodes, or give files (hpcgpu topo --json > node.json on each)"
        )
    found = differences(nodes)
    return "\n".join([*found, f"{len(nodes)} nodes, {f'{len(found)} differences' if found else 'all alike'}", ""])


def _described(path: Path) -> dict[str, Any]:
    text = _text(path)
    if not text.lstrip().startswith("{"):
        return describe(document.read(text), ())
    return _read_described(text, str(path))


def _read_described(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        differences({"a": found, "b": found})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{where} is not what hpcgpu topo --json prints ({type(e).__name__}: {e})") from e
    return dict(found)


def _nodes_of_the_job() -> dict[str, dict[str, Any]]:
    argv = start.node_argv((sys.executable, "-m", "hpcgpu", "topo", "--json", "--one-line"))
    done = programs.run_sync(Command(argv, timeout_s=_NODES_TIMEOUT_S))
    if done.returncode != 0:
        raise LaunchError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
    found = [_read_described(line, "a node's answer") for line in done.stdout.splitlines() if line.startswith("{")]
    by_host = {node["machine"]["host"]: node for node in found}
    return {host: by_host[host] for host in sorted(by_host)}  # they answer in any order
