"""The facts about one machine: a site file.

The classes here and in ``model.site_facts`` are the schema: ``hpcgpu.config.sites`` reads YAML into them, and makes the
JSON schema and the reference page from their fields and texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

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
    tags_of,
)

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
