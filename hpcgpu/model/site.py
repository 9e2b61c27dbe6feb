"""The facts about one machine: a site file, and what its batch system reports of queues and nodes for a draft of it.

The classes here and in ``model.site_facts`` are the schema: ``hpcgpu.config.sites`` reads YAML into them, and makes the
JSON schema and the reference page from their fields and texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from hpcgpu.errors import ConfigError
from hpcgpu.model.site_facts import (
    NOTHING,
    Account,
    Charge,
    Dashboard,
    Launcher,
    Login,
    Match,
    Modules,
    Network,
    NodeType,
    Note,
    Queue,
    Rule,
    Scratch,
    Source,
    Tags,
    fact,
    source,
    tags_of,
)

_ARRAY = "the most jobs of one array"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmDialect:
    """For Slurm."""

    gpus: Literal["gpus-per-node", "gres", "gpus", "none"] | None = fact(
        None, "the option for GPUs, `gpus` with those of the whole job; `none`: whole nodes come with theirs"
    )
    gpu_type: str | None = fact(None, "type of the GPU in that request, where the site wants one")
    memory: Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"] | None = fact(
        None, "the option for memory; `none`: it may not be asked for"
    )
    cpus: bool | None = fact(None, "may `--cpus-per-task` be given")
    queue: Literal["partition", "qos"] | None = fact(None, "the option for `queue=`")
    array_limit: int | None = fact(None, f"{_ARRAY} (`MaxArraySize`; 1001 if not given)")
    source: Tags = source()

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsDialect:
    """For PBS, where each node is one chunk of `select` unless `select` says otherwise."""

    gpus: Literal["ngpus", "gpus", "none"] | None = fact(
        None, "the chunk's resource for GPUs; `none`: whole nodes come with theirs"
    )
    gpu_chunks: tuple[str, ...] | None = fact(None, "queues in which a chunk is one GPU, and all are on one node")
    mpiprocs: bool | None = fact(None, "may `mpiprocs` be given")
    cpus: bool | None = fact(None, "may `ncpus` be given")
    memory: Literal["mem", "none"] | None = fact(None, "the resource for memory; `none`: it may not be asked for")
    place: str | None = fact(None, "the value of `-l place=`")
    resources: str | None = fact(None, "resources added to each chunk, such as `system=polaris`")
    account: Literal["-A", "-P"] | None = fact(None, "the option for `account=`")
    array_limit: int | None = fact(None, f"{_ARRAY} (`max_array_size`; 10000 if not given)")
    select: bool | None = fact(
        None,
        "`false`: no `-l select`, but totals of the job, `-l ngpus=8`, `-l ncpus=96`, `-l mem=`; without `mpiprocs` "
        "and `place`; `resources` are `-l` of their own",
    )
    cpus_multiple_of: int | None = fact(
        None, "the cores of each GPU are a multiple of it: 12 where the rule is `ncpus = 12 x ngpus`"
    )
    direct_output: bool | None = fact(
        None, "`false`: the site refuses `-k doe`, and a job's log is there when the job has ended"
    )
    source: Tags = source()

    def __post_init__(self) -> None:
        _check(self)


DIALECTS: Mapping[str, type[SlurmDialect] | type[PbsDialect]] = MappingProxyType(
    {"slurm": SlurmDialect, "pbs": PbsDialect}
)


def _check(dialect: Any) -> None:  # one of the two
    for name in ("array_limit", "cpus_multiple_of"):
        value = getattr(dialect, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value} is no count; allowed: 1 or more")


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


Path = tuple[str | int, ...]  # to a value of the file: ("queues", 1, "walltime")


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
    def ucx(self) -> bool:
        """True if UCX may have a transport for the site's network."""
        return self.network.ucx is not False

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

    def cited(self, tags: Tags, *path: str | int) -> str:
        """Format the sources and the place of a value: ``ALCF user guide, 2026-08; polaris.yaml:23``."""
        parts = [*(str(self.sources[tag]) for tag in tags_of(tags)), *filter(None, [self.at(*path)])]
        return "; ".join(parts) or f"the site file of {self.name}"

    def at(self, *path: str | int) -> str:
        """Return the place of a value, or of the innermost block on its path; "" if it is in no file."""
        ends = range(len(path), 0, -1)
        return next((place for end in ends if (place := self.origins.get(path[:end]))), "")

    def place(self, *path: str | int) -> str:
        """Format the place of a value as settings name it: ``site polaris, site_configs/polaris.yaml:23``."""
        return ", ".join(filter(None, (f"site {self.name}", self.at(*path))))

    def path_of(self, block: Queue | Rule | NodeType) -> Path:
        """Return the path to one of the file's queues, rules or types of nodes; () for any other part."""
        for name, blocks in (("queues", self.queues), ("rules", self.rules)):
            for i, entry in enumerate(blocks):
                if entry is block:
                    return name, i
        return next((("nodes", name) for name, node in self.nodes.items() if node is block), ())

    def blocks(self) -> Iterator[tuple[str, Tags]]:
        """Yield each non-empty block as a path, with its tags."""
        for name in ("match", "account", "network", "launcher", "scratch", "modules", "login", "dashboard", "charge"):
            block = getattr(self, name)
            if block != type(block)():
                yield name, block.source
        for name in ("dialect", "defaults"):
            if block := getattr(self, name):
                yield name, block.get("source", ())
        for name in ("rules", "queues", "notes"):
            yield from ((f"{name}[{i}]", block.source) for i, block in enumerate(getattr(self, name)))
        yield from ((f"nodes.{name}", block.source) for name, block in self.nodes.items())
