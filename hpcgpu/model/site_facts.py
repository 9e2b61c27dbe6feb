"""The blocks of a site file, each with its sources."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from hpcgpu.errors import ConfigError
from hpcgpu.units import parse_bytes, parse_duration_s

Tags = str | tuple[str, ...]
_MINUTE_S = 60  # no queue has a shorter limit: the unit is missing
_DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")


def fact(default: Any, text: str) -> Any:  # the field's own annotation says the type
    """Return a field of a site file with its meaning; a field without a default (``MISSING``) must be given."""
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata={"text": text})
    return field(default=default, metadata={"text": text})


def source() -> Any:
    """Return the field for a block's sources, which every block has."""
    return fact((), "tag or tags of `sources`: where the block was read")


NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A page or a file in which a fact was read."""

    title: str = fact(MISSING, "what it is called")
    date: str = fact(MISSING, "`2026-08`, or with the day, of its last change or of the reading")
    url: str = fact("", "where it is")
    kind: Literal["site", "third party"] = fact("site", "the site's own document, or somebody else's script or page")

    def __post_init__(self) -> None:
        if not _DATE.fullmatch(self.date):
            raise ConfigError(f"date: {self.date!r} is no date; allowed: '2026-08' or '2026-08-31'")

    def __str__(self) -> str:
        third = ", not the site's own" if self.kind != "site" else ""
        return f"{self.title}, {self.date}{third}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How the machine is recognised: any variable that has this value, or the name of the host."""

    env: Mapping[str, str] = fact(NOTHING, "variables and their values")
    host: str = fact("", "regular expression for the whole name of a login node")
    source: Tags = source()

    def __post_init__(self) -> None:
        try:
            re.compile(self.host)
        except re.error as error:
            raise ConfigError(f"host: {self.host!r} is no regular expression: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The account that pays."""

    needed: bool = fact(False, "whether a job without one is refused")
    env: tuple[str, ...] = fact((), "variables that have it; the first that is set counts")
    text: str = fact("", "what to know of it, such as the error for a missing one")
    source: Tags = source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that jobs must say, or must not."""

    require: str = fact("", "setting (`walltime`) or batch system's option (`-l filesystems`) that a job must give")
    forbid: str = fact("", "option that a job must not give (`--mem`)")
    why: str = fact("", "what the site does otherwise, or what to do instead")
    source: Tags = source()

    def __post_init__(self) -> None:
        if bool(self.require) == bool(self.forbid):
            raise ConfigError("a rule has either require or forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """How jobs of a queue are ended for others."""

    signal: str = fact("", "what they get; empty: nothing before SIGKILL")
    grace: str | int | None = fact(None, "time from the signal to SIGKILL")
    text: str = fact("", "more words")

    def __post_init__(self) -> None:
        _check_time("grace", self.grace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue, partition or QOS, as `queue=` names it, and its limits. What is not said is not limited."""

    name: str = fact(MISSING, "as in `queue=`")
    nodes: tuple[int, int] | None = fact(None, "the fewest and the most nodes of a job")
    gpus: tuple[int, int] | None = fact(None, "the fewest and the most GPUs of a job")
    walltime: str | int | None = fact(None, "the longest time of a job")
    walltime_by_nodes: Mapping[int, str | int] = fact(
        NOTHING, "the same by size: `{10: 3h, 25: 6h}` is 3 h from 10 nodes on, 6 h from 25 on"
    )
    jobs_per_user: int | None = fact(None, "jobs of one user that run at a time")
    submitted_per_user: int | None = fact(None, "jobs of one user that are running or waiting")
    shared: bool | None = fact(None, "whether several jobs may be on a node")
    node: str = fact("", "name of its nodes' type in `nodes`")
    directives: tuple[str, ...] = fact((), "what its jobs say besides the name, such as `--qos=debug`")
    preemption: Preemption | None = fact(None, "how its jobs are ended for others; not given: they are not")
    charge: float | None = fact(None, "factor of the site's charge")
    text: str = fact("", "more words")
    source: Tags = source()

    def __post_init__(self) -> None:
        for name, limits in (("nodes", self.nodes), ("gpus", self.gpus)):
            if limits and not 1 <= limits[0] <= limits[1]:
                raise ConfigError(f"{name}: {list(limits)} are no limits; allowed: [fewest, most], from 1")
        for name in ("jobs_per_user", "submitted_per_user"):
            _check_count(name, getattr(self, name))
        _check_time("walltime", self.walltime)
        for first, walltime in self.walltime_by_nodes.items():
            _check_count("walltime_by_nodes", first)
            _check_time("walltime_by_nodes", walltime)

    def walltime_s(self, nodes: int) -> int | None:
        """Return the longest time of a job of so many nodes; None: unlimited, or unknown."""
        steps = [walltime for first, walltime in sorted(self.walltime_by_nodes.items()) if first <= nodes]
        longest = steps[-1] if steps else self.walltime
        return None if longest is None else parse_duration_s(longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A port of a network card."""

    name: str = fact(MISSING, "as the node names it, `mlx5_0`, `hsn0`")
    kind: Literal["infiniband", "roce", "slingshot", "opa", "ethernet"] = fact(MISSING, "its network")
    numa: int | None = fact(None, "the NUMA node that it is next to; not given: unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """Nodes of one kind."""

    gpus: int = fact(MISSING, "GPUs of a node")
    gpu: str = fact("", "their model")
    arch: Literal["", "x86_64", "aarch64"] = fact("", "architecture of the CPUs")
    cores: int | None = fact(None, "cores of a node")
    cpus: int | None = fact(
        None, "what jobs may request of a node, cores or threads; shared nodes: `cores` if not given"
    )
    memory: str | int | None = fact(None, "memory of a node")
    job_memory: str | int | None = fact(None, "what jobs may ask for of it; shared nodes: 7/8 of it if not given")
    numa_cores: tuple[int, ...] = fact((), "cores of each NUMA node, in order")
    packages: tuple[int, ...] = fact((), "package (socket) of each NUMA node; all in one if not given")
    gpu_numa: tuple[int, ...] = fact((), "NUMA node of each GPU, in order of the GPUs' numbers")
    gpu_memory_nodes: bool = fact(False, "whether the GPUs' own memory shows as NUMA nodes, too (Grace Hopper)")
    ports: tuple[Port, ...] = fact((), "network ports")
    disk: str = fact("", "local disk")
    text: str = fact("", "more words, such as doubts")
    source: Tags = source()

    def __post_init__(self) -> None:
        for name in ("gpus", "cores", "cpus"):
            _check_count(name, getattr(self, name))
        for name in ("memory", "job_memory"):
            if (size := getattr(self, name)) is not None and parse_bytes(size) < 1:
                raise ConfigError(f"{name}: {size!r} is no memory; allowed: a size such as 512GiB")
        if self.memory is not None and self.job_memory and parse_bytes(self.job_memory) > parse_bytes(self.memory):
            raise ConfigError(f"job_memory: {self.job_memory!r} is more than the node has, memory: {self.memory!r}")
        if self.gpu_numa and len(self.gpu_numa) != self.gpus:
            raise ConfigError(f"gpu_numa: NUMA nodes of {len(self.gpu_numa)} GPUs, but gpus is {self.gpus}")
        count = len(self.numa_cores)
        if count and any(not 0 <= n < count for n in (*self.gpu_numa, *(p.numa or 0 for p in self.ports))):
            raise ConfigError(f"gpu_numa and ports: numa_cores has the NUMA nodes 0 to {count - 1} only")
        if count and self.cores is not None and sum(self.numa_cores) != self.cores:
            raise ConfigError(f"numa_cores: they are {sum(self.numa_cores)} cores, but cores is {self.cores}")
        if self.packages and len(self.packages) != count:
            raise ConfigError(f"packages: those of {len(self.packages)} NUMA nodes, but numa_cores has {count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between the nodes, and what it carries."""

    kind: Literal["", "infiniband", "roce", "slingshot", "opa", "ethernet"] = fact("", "what it is")
    ucx: bool | None = fact(None, "has UCX a transport for it; `false`: `protocol='ucx'` is refused")
    interfaces: tuple[str, ...] = fact((), "IP interfaces that were seen in use")
    outgoing: str = fact("", "how nodes reach the outside")
    text: str = fact("", "more words")
    source: Tags = source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The program that starts ranks there."""

    family: str = fact("", "`srun`, `pals`, `openmpi`, `ibrun` ...: for people")
    command: tuple[str, ...] = fact(
        (),
        "words to start ranks with: a path or name of `mpirun` or `mpiexec`, which get the number of ranks and what "
        "else they need, or of a program that starts as many as it does",
    )
    text: str = fact("", "more words")
    source: Tags = source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Folders for data that may go."""

    path: str = fact("", "fast local folder of a node, with `$VARIABLES`: the default of `local_directory`")
    in_memory: bool = fact(False, "it lies in the node's memory: then it is no default")
    size: str | int | None = fact(None, "its size, or the quota of it")
    needs: str = fact("", "option of the batch system that grants it")
    shared: str = fact("", "variable with the shared file system's folder")
    text: str = fact("", "more words")
    source: Tags = source()

    def __post_init__(self) -> None:
        if self.size is not None:
            parse_bytes(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """Modules that every job must load: lines of its script before those of `job_script_prologue`."""

    use: tuple[str, ...] = fact((), "folders for `module use`")
    load: tuple[str, ...] = fact((), "for `module load`, in order")
    why: str = fact("", "what happens without")
    source: Tags = source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """The login nodes."""

    arch: Literal["", "x86_64", "aarch64"] = fact("", "architecture of the CPUs")
    policy: str = fact("", "what happens to processes that compute there")
    source: Tags = source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """How a web page of a compute node is reached."""

    url: str = fact("", "address with `{node}` and `{port}`, of the site's own portal")
    text: str = fact("", "more words")
    source: Tags = source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """The price of a job; times the queue's `charge`."""

    unit: str = fact("", "the site's word, `SU`")
    per_node_hour: float | None = fact(None, "units for a node and hour")
    per_gpu_hour: float | None = fact(None, "units for a GPU and hour")
    text: str = fact("", "the site's rule")
    source: Tags = source()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A remark for users."""

    text: str = fact(MISSING, "the words")
    source: Tags = source()


def tags_of(tags: Tags) -> tuple[str, ...]:
    """Return the tags of a block as a tuple, also of a block with a single tag."""
    return (tags,) if isinstance(tags, str) else tags


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name}: {value} is no count; allowed: 1 or more")


def _check_time(name: str, value: str | int | None) -> None:
    if isinstance(value, int) and 0 < value < _MINUTE_S and name != "grace":
        raise ConfigError(f"{name}: {value} is {value} seconds; with a unit: '{value}m', '{value}h', '{value}d'")
    with contextlib.suppress(ConfigError):
        if value is None or parse_duration_s(value) > 0:
            return
    raise ConfigError(f"{name}: {value!r} is no time; allowed: '02:00:00', '2h', '1d'")
