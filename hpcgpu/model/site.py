"""The facts about one machine: a site file, and what its batch system reports of queues and nodes for a draft of it.

The classes are the schema: ``hpcgpu.config.sites`` reads YAML into them, and ``scripts/site_schema.py`` makes the JSON
schema and the reference page from their fields and texts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from hpcgpu.errors import ConfigError
from hpcgpu.units import DURATIONS, parse_bytes, parse_duration_s

Tags = str | tuple[str, ...]
_DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")
_SOURCE = "tag or tags of `sources`: where the block was read"
NOTHING: Mapping[str, Any] = MappingProxyType({})
_ARRAY = "the most jobs of one array"
Path = tuple[str | int, ...]  # to a value of the file: ("queues", 1, "walltime")


def fact(default: Any, text: str) -> Any:  # the field's own annotation says the type
    """Return a field of a site file with its meaning; a field without a default (``MISSING``) must be given."""
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata={"text": text})
    return field(default=default, metadata={"text": text})


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
class Block:
    """A part of the file."""

    text: str = fact("", "more words")
    source: Tags = fact((), _SOURCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match(Block):
    """How the machine is recognised: any variable that has this value, or the name of the host."""

    env: Mapping[str, str] = fact(NOTHING, "variables and their values")
    host: str = fact("", "regular expression for the whole name of a login node")

    def __post_init__(self) -> None:
        try:
            re.compile(self.host)
        except re.error as error:
            raise ConfigError(f"host: {self.host!r} is no regular expression: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Block):
    """The account that pays."""

    needed: bool = fact(False, "whether a job without one is refused")
    env: tuple[str, ...] = fact((), "variables that have it; the first that is set counts")
    text: str = fact("", "what to know of it, such as the error for a missing one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Block):
    """One thing that jobs must say, or must not."""

    require: str = fact("", "setting (`walltime`) or batch system's option (`-l filesystems`) that a job must give")
    forbid: str = fact("", "option that a job must not give (`--mem`)")
    why: str = fact("", "what the site does otherwise, or what to do instead")

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
class Queue(Block):
    """A queue, partition or QOS, as `queue=` names it, and its limits. What is not said is not limited."""

    name: str = fact(MISSING, "as in `queue=`")
    nodes: tuple[int, int] | None = fact(None, "the fewest and the most nodes of a job")
    gpus: tuple[int, int] | None = fact(None, "the fewest and the most GPUs of a job")
    walltime: str | int | None = fact(None, "the longest time of a job, `24h`; not a number alone")
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
class NodeType(Block):
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
class Network(Block):
    """The network between the nodes, and what it carries."""

    kind: Literal["", "infiniband", "roce", "slingshot", "opa", "ethernet"] = fact("", "what it is")
    ucx: bool | None = fact(None, "has UCX a transport for it; `false`: `protocol='ucx'` is refused")
    interfaces: tuple[str, ...] = fact((), "IP interfaces that were seen in use")
    outgoing: str = fact("", "how nodes reach the outside")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(Block):
    """The program that starts ranks there."""

    family: str = fact("", "`srun`, `pals`, `openmpi`, `ibrun` ...: for people")
    command: tuple[str, ...] = fact(
        (),
        "words to start ranks with: a path or name of `mpirun` or `mpiexec`, which get the number of ranks and what "
        "else they need, or of a program that starts as many as it does",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch(Block):
    """Folders for data that may go."""

    path: str = fact("", "fast local folder of a node, with `$VARIABLES`: the default of `local_directory`")
    in_memory: bool = fact(False, "it lies in the node's memory: then it is no default")
    size: str | int | None = fact(None, "its size, or the quota of it")
    needs: str = fact("", "option of the batch system that grants it")
    shared: str = fact("", "variable with the shared file system's folder")

    def __post_init__(self) -> None:
        if self.size is not None:
            parse_bytes(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules(Block):
    """Modules that every job must load: lines of its script before those of `job_script_prologue`."""

    use: tuple[str, ...] = fact((), "folders for `module use`")
    load: tuple[str, ...] = fact((), "for `module load`, in order")
    why: str = fact("", "what happens without")


@dataclass(frozen=True, slots=True, kw_only=True)
class Login(Block):
    """The login nodes."""

    arch: Literal["", "x86_64", "aarch64"] = fact("", "architecture of the CPUs")
    policy: str = fact("", "what happens to processes that compute there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard(Block):
    """How a web page of a compute node is reached."""

    url: str = fact("", "address with `{node}` and `{port}`, of the site's own portal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge(Block):
    """The price of a job; times the queue's `charge`."""

    unit: str = fact("", "the site's word, `SU`")
    per_node_hour: float | None = fact(None, "units for a node and hour")
    per_gpu_hour: float | None = fact(None, "units for a GPU and hour")
    text: str = fact("", "the site's rule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Block):
    """A remark for users."""

    text: str = fact(MISSING, "the words")


def tags_of(tags: Tags) -> tuple[str, ...]:
    """Return the tags of a block as a tuple, also of a block with a single tag."""
    return (tags,) if isinstance(tags, str) else tags


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name}: {value} is no count; allowed: 1 or more")


def _check_time(name: str, value: str | int | None) -> None:
    if isinstance(value, int) and name != "grace":  # Slurm's GraceTime is in seconds
        raise ConfigError(f"{name}: {value} has no unit; allowed: {DURATIONS}, with quotes")
    with contextlib.suppress(ConfigError):
        if value is None or parse_duration_s(value) > 0:
            return
    raise ConfigError(f"{name}: {value!r} is no time; allowed: {DURATIONS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmDialect:
    """For Slurm."""

    gpus: Literal["gpus-per-node", "gres", "gpus", "none"] = fact(
        "gpus-per-node", "the option for GPUs, `gpus` with those of the whole job; `none`: whole nodes come with theirs"
    )
    gpu_type: str = fact("", "type of the GPU in that request, where the site wants one")
    memory: Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"] = fact(
        "mem", "the option for memory; `none`: it may not be asked for"
    )
    cpus: bool = fact(True, "may `--cpus-per-task` be given")
    queue: Literal["partition", "qos"] = fact("partition", "the option for `queue=`")
    array_limit: int = fact(1001, f"{_ARRAY} (`MaxArraySize`; 1001 if not given)")
    source: Tags = fact((), _SOURCE)

    def __post_init__(self) -> None:
        _check_count("array_limit", self.array_limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsDialect:
    """For PBS, where each node is one chunk of `select` unless `select` says otherwise."""

    gpus: Literal["ngpus", "gpus", "none"] = fact(
        "ngpus", "the chunk's resource for GPUs; `none`: whole nodes come with theirs"
    )
    gpu_chunks: tuple[str, ...] = fact((), "queues in which a chunk is one GPU, and all are on one node")
    mpiprocs: bool = fact(True, "may `mpiprocs` be given")
    cpus: bool = fact(True, "may `ncpus` be given")
    memory: Literal["mem", "none"] = fact("mem", "the resource for memory; `none`: it may not be asked for")
    # without scatter, two chunks may be put on one node
    place: str = fact("scatter", "the value of `-l place=`")
    resources: str = fact("", "resources added to each chunk, such as `system=polaris`")
    account: Literal["-A", "-P"] = fact("-A", "the option for `account=`")
    array_limit: int = fact(10000, f"{_ARRAY} (`max_array_size`; 10000 if not given)")
    select: bool = fact(
        True,
        "`false`: no `-l select`, but totals of the job, `-l ngpus=8`, `-l ncpus=96`, `-l mem=`; without `mpiprocs` "
        "and `place`; `resources` are `-l` of their own",
    )
    cpus_multiple_of: int = fact(
        1, "the cores of each GPU are a multiple of it: 12 where the rule is `ncpus = 12 x ngpus`"
    )
    direct_output: bool = fact(
        True, "`false`: the site refuses `-k doe`, and a job's log is there when the job has ended"
    )
    source: Tags = fact((), _SOURCE)

    def __post_init__(self) -> None:
        _check_count("array_limit", self.array_limit)
        _check_count("cpus_multiple_of", self.cpus_multiple_of)


DIALECTS: Mapping[str, type[SlurmDialect] | type[PbsDialect]] = {"slurm": SlurmDialect, "pbs": PbsDialect}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Queues and nodes with GPUs, as the batch system reports them."""

    batch: str  # slurm or pbs
    queues: tuple[Queue, ...] = ()  # with GPU nodes, or with unknown nodes
    nodes: Mapping[str, NodeType] = field(default_factory=dict)  # types of nodes with GPUs, by name
    default: str = ""  # the default queue; empty: none, or unknown
    gpu_type: str = ""  # of all GPUs, if Slurm's gres have a single type
    array_limit: int | None = None  # the most elements of an array; None: unknown
    silent: tuple[str, ...] = ()  # programs without an answer, with their messages


def dotted(path: Path) -> str:
    """Format a path: ``queues[1].walltime``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site file."""

    name: str = fact(MISSING, "name of the site, and of its file: small letters, digits, `.`, `_`, `-`")
    batch: Literal["slurm", "pbs"] = fact(MISSING, "the batch system")
    version: Literal[2] = fact(2, "version of this schema")
    title: str = fact("", "the machine and the centre, for people")
    sources: Mapping[str, Source] = fact(NOTHING, "what was read, by tags of your own")
    match: Match = fact(Match(), "how the machine is recognised")
    dialect: Mapping[str, Any] = fact(NOTHING, "how the batch system is spoken to")
    account: Account = fact(Account(), "who pays")
    rules: tuple[Rule, ...] = fact((), "what jobs must say, or must not")
    queues: tuple[Queue, ...] = fact((), "queues with their limits")
    nodes: Mapping[str, NodeType] = fact(NOTHING, "types of nodes with GPUs, by names of your own")
    network: Network = fact(Network(), "the network, and what it carries")
    launcher: Launcher = fact(Launcher(), "what starts ranks")
    scratch: Scratch = fact(Scratch(), "folders for data that may go")
    modules: Modules = fact(Modules(), "modules that every job must load")
    login: Login = fact(Login(), "the login nodes")
    dashboard: Dashboard = fact(Dashboard(), "how a web page of a compute node is reached")
    charge: Charge = fact(Charge(), "what a job costs")
    defaults: Mapping[str, Any] = fact(NOTHING, "settings, by the names and with the values that users give")
    notes: tuple[Note, ...] = fact((), "what users should know")
    # Where each value stands, ``site_configs/polaris.yaml:23``. It is no key of the file, so no fact().
    origins: Mapping[Path, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The defaults, without their source."""
        return {name: value for name, value in self.defaults.items() if name != "source"}

    @property
    def spoken(self) -> dict[str, Any]:
        """The dialect, without its source: fields of the batch system's class."""
        return {name: value for name, value in self.dialect.items() if name != "source"}

    @property
    def required(self) -> tuple[str, ...]:
        """Settings without which the site refuses a job."""
        names = [rule.require for rule in self.rules if rule.require and not rule.require.startswith("-")]
        return tuple(dict.fromkeys([*(["account"] if self.account.needed else []), *names]))

    def queue(self, name: str | None) -> Queue | None:
        """Return the queue of that name, the default queue for None; None if the file does not have it."""
        wanted_name = name or self.defaults.get("queue")
        return next((queue for queue in self.queues if queue.name == wanted_name), None)

    def node(self, queue: str | None = None) -> NodeType | None:
        """Return the type of a queue's nodes, or the only type; None if the file does not name it."""
        entry = self.queue(queue)
        if entry and entry.node:
            return self.nodes.get(entry.node)
        return next(iter(self.nodes.values())) if len(self.nodes) == 1 else None

    def cited(self, block: Any, *keys: str) -> str:
        """Format the sources and the place of a block or a value in it: ``ALCF guide, 2026-08; polaris.yaml:23``."""
        parts = [*(str(self.sources[tag]) for tag in tags_of(block.source)), self.at(*self.path_of(block), *keys)]
        return "; ".join(filter(None, parts)) or f"the site file of {self.name}"

    def at(self, *path: str | int) -> str:
        """Return the place of a value, or of the innermost block on its path; "" if it is in no file."""
        ends = range(len(path), 0, -1)
        return next((place for end in ends if (place := self.origins.get(path[:end]))), "")

    def place(self, *path: str | int) -> str:
        """Format the place of a value as settings name it: ``site polaris, site_configs/polaris.yaml:23``."""
        return ", ".join(filter(None, (f"site {self.name}", self.at(*path))))

    def path_of(self, block: Any) -> Path:
        """Return the path to a block of the file; () for one that it does not have."""
        return next((path for path, each, _ in self.blocks() if each is block), ())

    def blocks(self) -> Iterator[tuple[Path, Any, Tags]]:
        """Yield each block that is not empty, with its path and its tags."""
        for name in ("match", "account", "network", "launcher", "scratch", "modules", "login", "dashboard", "charge"):
            if (block := getattr(self, name)) != type(block)():
                yield (name,), block, block.source
        for name in ("dialect", "defaults"):
            if block := getattr(self, name):
                yield (name,), block, block.get("source", ())
        for name in ("rules", "queues", "notes"):
            yield from (((name, i), block, block.source) for i, block in enumerate(getattr(self, name)))
        yield from ((("nodes", name), node, node.source) for name, node in self.nodes.items())
