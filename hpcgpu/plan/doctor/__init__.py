"""Find faults of a cluster's machines: facts in, findings out. Here are the facts and the findings."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpcgpu.model import Hop, Nic


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The job as the batch system is asked for it."""

    batch: str
    starts: str = ""  # the expected start in the batch system's format; "": it cannot be asked
    refused: str = ""  # its message if it would refuse the job; "": it would not
    unasked: str = ""  # why it was not asked; "": it was


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder and its file system."""

    path: str
    kind: str = ""  # the file system's type; "": unknown
    network: bool = False  # other nodes can see such a file system
    memory: bool = False  # it is in memory
    free_bytes: int = -1  # for this user; -1: unknown
    free_files: int = -1  # for this user; -1: unknown, or unlimited
    create_s: float = 0.0  # creation and removal of one small file
    bytes_per_s: float = 0.0  # of writing, with fsync; 0: not written
    clock_s: float = 0.0  # the file server's clock minus this machine's
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Soft limits of a process; -1: unlimited."""

    files: int
    processes: int
    locked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A machine's names and addresses."""

    host: str
    resolved: tuple[str, ...] = ()  # the addresses of the host's name
    interfaces: tuple[tuple[str, str], ...] = ()  # (interface, address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """A Python and its packages."""

    path: str
    version: str
    machine: str  # the CPU architecture
    packages: Mapping[str, str]  # versions by name
    broken: str = ""  # why packages cannot be imported; "": they can, or were not tried
    import_s: float = 0.0  # of the packages


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginFacts:
    """The facts of the login node; of a fact that is None, ``unknown`` has the reason."""

    request: Request | None = None
    python: Python | None = None
    environment: Folder | None = None
    home: Folder | None = None
    scratch: Folder | None = None
    limits: Limits | None = None
    names: Names | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An attempt to connect two machines by TCP."""

    source: str  # a machine's name
    target: str  # a machine's name
    interface: str  # of the target
    address: str  # of the target
    took_s: float = 0.0  # until the answer
    clock_s: float = 0.0  # the target's clock minus the source's
    error: str = ""  # "": it connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The command that starts the ranks, and its result."""

    command: str = ""  # "": one process for all workers, no launcher
    error: str = ""  # why no launcher fits; "": one does
    library: str = ""  # the ranks' MPI library; "": no rank has reported it
    worlds: tuple[int, ...] = ()  # the size of the MPI world, as each rank reports it
    exit_code: int | None = None  # None: not tried, because the ranks need no MPI
    output: str = ""  # its first lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Ucx:
    """UCX's version and transports."""

    version: str
    transports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts of one node of the job; of a fact that is None, ``unknown`` has the reason."""

    host: str
    python: Python
    limits: Limits
    cpus: int  # PUs that the job's processes may use
    cores: int  # PUs of the node
    memory_bytes: int  # host memory that the kernel lets the job use
    temporary: str  # the folder of temporary files
    gpus: tuple[str, ...] = ()  # names of the NVIDIA GPUs by NVML
    compute_modes: tuple[str, ...] = ()  # of each: model.Gpu.compute_mode
    driver: str = ""  # its version; "": none
    no_driver: str = ""  # why no driver answers
    granted_gpus: int | None = None  # by the batch system; None: unknown
    nics: tuple[Nic, ...] | None = None
    hops: tuple[Hop, ...] = ()  # PCI paths between GPUs and NICs
    scratch: Folder | None = None
    ucx: Ucx | None = None  # by ucx_info
    links: tuple[Link, ...] = ()
    copy_obstacle: str = ""  # why its processes cannot read each other's memory; "": they can
    unknown: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFacts:
    """The facts of the job, from the login node and from its nodes."""

    job_id: str
    folder: str  # in the home; its nodes write into it
    wanted_nodes: int  # requested
    wanted_gpus: int  # of each node, requested; simulated ones do not count
    protocol: str  # of the workers; "": the default
    python: Python  # of the login node
    nodes: tuple[NodeFacts, ...] = ()  # those that have answered
    ended: str = ""  # the job's end, in the batch system's words
    output: str = ""  # the last lines of the job's output; "": not readable here
    launcher: Launcher | None = None  # of the ranks
    links: tuple[Link, ...] | None = None  # from the login node to the job's nodes
    unknown: Mapping[str, str] = field(default_factory=dict)


class Verdict(enum.Enum):
    """The result of a check in one word."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_LOOKED_AT = "not looked at"


class CheckResult(NamedTuple):
    """The result of a check: one line of the doctor's report."""

    verdict: Verdict
    seen: str  # the observation; or why there is none
    advice: str = ""  # what to do; "": nothing
    name: str = ""  # of the check; :func:`examine` adds it


class Check(NamedTuple):
    """A check: a fact, and the function that judges it."""

    name: str
    fact: str  # a field of the facts, perhaps None; "": all of them
    look: Callable[[Any], CheckResult]  # called with the fact


def examine(checks: Iterable[Check], facts: Any) -> tuple[CheckResult, ...]:
    """Run the checks; a check is not looked at if its fact is None, for the reason in ``facts.unknown``."""
    out = []
    for name, fact, look in checks:
        value = getattr(facts, fact) if fact else facts
        missing = not_looked_at(facts.unknown.get(fact, "it is not known here"))
        out.append((missing if value is None else look(value))._replace(name=name))
    return tuple(out)


def ok(seen: str) -> CheckResult:
    """Return an OK result."""
    return CheckResult(Verdict.OK, seen)


def warning(seen: str, advice: str) -> CheckResult:
    """Return a result with which a cluster may be slow, or fail later."""
    return CheckResult(Verdict.WARNING, seen, advice)


def failed(seen: str, advice: str) -> CheckResult:
    """Return a result with which a cluster cannot work."""
    return CheckResult(Verdict.FAILED, seen, advice)


def not_looked_at(why: str) -> CheckResult:
    """Return a result without an observation, and the reason."""
    return CheckResult(Verdict.NOT_LOOKED_AT, why)


def worst(results: Iterable[CheckResult]) -> CheckResult:
    """Return the first of the worst of several results."""
    order = (Verdict.FAILED, Verdict.WARNING, Verdict.OK, Verdict.NOT_LOOKED_AT)
    return min(results, key=lambda seen: order.index(seen.verdict))


def on(node: NodeFacts, seen: CheckResult) -> CheckResult:
    """Return a result with the node's name."""
    return seen._replace(seen=f"{node.host}: {seen.seen}")


def each(facts: TrialFacts, fact: str, look: Callable[[NodeFacts, Any], CheckResult]) -> CheckResult:
    """Return the worst result of the nodes, each judged by this fact of it."""
    values = [(node, getattr(node, fact)) for node in facts.nodes]
    return worst(
        on(node, not_looked_at(node.unknown.get(fact, "it is not known")) if value is None else look(node, value))
        for node, value in values
    )


def exit_code(findings: Iterable[CheckResult]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))
