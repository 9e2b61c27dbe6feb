"""Find faults of a cluster's machines: facts in, findings out. Here are the checks of the login node."""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from hpcgpu.model import Hop, Nic
from hpcgpu.units import format_bytes


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

    request: CheckResult | None = None  # of asking whether the batch system would accept the job
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
    folder: str = ""  # of the libraries that workers load; "": workers have no ucxx, and it is that of PATH
    has_ib: bool = True  # has it a module for InfiniBand and RoCE?


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


ok = partial(CheckResult, Verdict.OK)
warning = partial(CheckResult, Verdict.WARNING)  # with it a cluster may be slow, or fail later
failed = partial(CheckResult, Verdict.FAILED)  # with it a cluster cannot work
not_looked_at = partial(CheckResult, Verdict.NOT_LOOKED_AT)  # with the reason


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


def worst(results: Iterable[CheckResult]) -> CheckResult:
    """Return the first of the worst of several results."""
    order = (Verdict.FAILED, Verdict.WARNING, Verdict.OK, Verdict.NOT_LOOKED_AT)
    return min(results, key=lambda seen: order.index(seen.verdict))


def each(fact: str, look: Callable[[TrialFacts, NodeFacts, Any], CheckResult], facts: TrialFacts) -> CheckResult:
    """Return the worst result of the nodes, each judged by this fact of it, with the node's name."""

    def judge(node: NodeFacts) -> CheckResult:
        value = getattr(node, fact)
        missing = not_looked_at(node.unknown.get(fact, "it is not known"))
        result = missing if value is None else look(facts, node, value)
        return result._replace(seen=f"{node.host}: {result.seen}")

    return worst(map(judge, facts.nodes))


def exit_code(findings: Iterable[CheckResult]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(finding.verdict is Verdict.FAILED for finding in findings))


_ROOM_BYTES, _ROOM_FILES = 1 << 30, 10_000
_SLOW_CREATE_S, _SLOW_BYTES_PER_S = 0.1, 20e6
_FILES, _PROCESSES, _LOCKED_BYTES = 4096, 1024, 1 << 30
_CLOCK_S = 1.0
# Slurm: "Invalid account or account/partition combination specified", "invalid partition specified: x"; OpenPBS:
# "Unknown queue". The account is matched first: Slurm's message on it names the partition, too.
_ACCOUNT = re.compile(r"account|association|project|bank", re.I)
_QUEUE = re.compile(r"partition|queue|qos", re.I)
IMPORTANT = ("hpcgpu", "dask", "distributed")


def confirmed(facts: LoginFacts, trial: TrialFacts) -> LoginFacts:
    """Return the facts with the job's results: it was accepted, its nodes have the home and this Python."""
    request, home, environment = facts.request, facts.home, facts.environment
    if request and request.verdict is not Verdict.OK:
        request = ok(f"it took job {trial.job_id}")
    if len(trial.nodes) >= trial.wanted_nodes:
        home = home and replace(home, network=True)
        if all(node.python.path == trial.python.path for node in trial.nodes):
            environment = environment and replace(environment, network=True)
    return replace(facts, request=request, home=home, environment=environment)


def refusal_advice(batch: str, message: str) -> str:
    """Return what to ask for instead, from the batch system's message."""
    if _ACCOUNT.search(message):
        mine = "sacctmgr show associations user=$USER" if batch == "slurm" else "the site's command for projects"
        return f"give an account that you may charge: --account NAME; {mine} lists yours"
    if _QUEUE.search(message):
        command = "sinfo --summarize" if batch == "slurm" else "qstat -Q"
        return f"give a queue that takes such a job: --queue NAME; {command} lists them"
    return "change the request: hpcgpu plan shows all of it, and where each part was set"


def check_python(python: Python) -> CheckResult:
    """Check that this Python has the packages."""
    missing = [name for name in IMPORTANT if name not in python.packages]
    versions = ", ".join(f"{name} {python.packages[name]}" for name in IMPORTANT if name in python.packages)
    if missing:
        again = f"{python.path} -m pip install {' '.join(missing)}"
        return failed(f"{python.path} has no {', '.join(missing)}", f"install the missing packages: {again}")
    return ok(f"Python {python.version} for {python.machine} with {versions}")


def check_environment(folder: Folder) -> CheckResult:
    """Check that the nodes can see the folder of this Python."""
    if folder.network:
        return ok(f"{folder.path} is on {folder.kind}, which nodes can share")
    return warning(
        f"{folder.path} ({folder.kind or 'file system unknown'}) seems to exist on this machine only",
        "hpcgpu doctor --submit shows whether the nodes have it; if not, install Python and packages into a shared "
        "folder, or name the nodes' Python by --python",
    )


def check_home(home: Folder) -> CheckResult:
    """Check that the home, in which a run's processes find each other, is shared, is fast and has room."""
    if trouble := _check_folder(home, "a run's processes find each other by files there"):
        return trouble
    if home.network:
        return ok(_describe(home))
    return warning(
        f"{_describe(home)}: it seems to exist on this machine only",
        "hpcgpu doctor --submit shows whether the nodes have it; a run needs one home on all machines",
    )


def check_scratch(scratch: Folder) -> CheckResult:
    """Check that scratch has room."""
    return _check_folder(scratch, "arrays are spilled there") or ok(_describe(scratch))


def _check_folder(folder: Folder, use: str) -> CheckResult | None:
    """Check that a folder can be written, has room and is fast; None if so."""
    if folder.error:
        return failed(f"{folder.path}: {folder.error}", f"make it writable, or choose another folder: {use}")
    if 0 <= folder.free_bytes < _ROOM_BYTES:
        return failed(
            f"{folder.path} has {format_bytes(folder.free_bytes)} free",
            f"remove files there, or choose another folder (--local-directory for scratch): {use}",
        )
    if 0 <= folder.free_files < _ROOM_FILES:
        return failed(
            f"{folder.path} has room for {folder.free_files} more files",
            f"remove files there (df -i, or the site's quota command, counts them): {use}",
        )
    if folder.create_s > _SLOW_CREATE_S or 0 < folder.bytes_per_s < _SLOW_BYTES_PER_S:
        return warning(_describe(folder), f"it is slow now: choose a faster folder, or try again later; {use}")
    return None


def _describe(folder: Folder) -> str:
    parts = [f"{folder.path} ({folder.kind or 'file system unknown'})"]
    if folder.free_bytes >= 0:
        parts.append(f"{format_bytes(folder.free_bytes)} free")
    if folder.bytes_per_s:
        parts.append(f"{format_bytes(int(folder.bytes_per_s))}/s")
    if folder.create_s:
        parts.append(f"{folder.create_s * 1e3:.2g} ms for a file")
    return ", ".join(parts)


def check_limits(limits: Limits) -> CheckResult:
    """Check a process's limits on files and processes: batch systems pass some of them on to jobs."""
    files, processes = ("any number of" if value < 0 else value for value in (limits.files, limits.processes))
    summary = f"{files} open files, {processes} processes"
    for name, value, least, option in (
        ("open files", limits.files, _FILES, "n"),
        ("processes", limits.processes, _PROCESSES, "u"),
    ):
        if 0 <= value < least:
            return warning(
                summary,
                f"a scheduler with many workers needs more {name}: ulimit -{option} {least} in the shell, and in jobs "
                f"by --job-script-prologue 'ulimit -{option} {least}'; ask the administrators if it is refused",
            )
    return ok(summary)


def check_locked_memory(limits: Limits, *, needed: bool = False) -> CheckResult:
    """Check the limit of locked memory, for RDMA and page-locked buffers; ``needed``: workers fail without it."""
    size = limits.locked_bytes
    if size < 0:
        return ok("no limit on locked memory")
    summary = f"{format_bytes(size)} of memory may be locked (ulimit -l)"
    advice = (
        "InfiniBand and RoCE register memory, which counts as locked: ask the administrators for 'memlock unlimited' "
        "on the nodes (limits.conf; slurmd's LimitMEMLOCK); until then take --protocol tls or tcp"
    )
    if needed:
        return failed(summary, advice)
    return ok(summary) if size >= _LOCKED_BYTES else warning(summary, advice)


def check_time(home: Folder) -> CheckResult:
    """Check that this machine and the home's file server have the same time."""
    skew = home.clock_s
    summary = f"the clock of {home.path} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
    if abs(skew) > _CLOCK_S:
        return warning(summary, "one of the two clocks is wrong: have the administrators look at chronyd or ntpd")
    return ok(f"this machine and {home.path} have the same time")


def check_names(names: Names) -> CheckResult:
    """Check that the machine's name resolves to an address that other machines can reach."""
    addresses = ", ".join(f"{address} ({interface})" for interface, address in names.interfaces)
    if not names.interfaces:
        seen = f"no interface of {names.host} has an address that other machines can reach"
        return failed(seen, "ask the administrators: this machine has no connection to others")
    if not names.resolved:
        return warning(
            f"{names.host} has {addresses}, but its name resolves to no address",
            "hpcgpu uses addresses, but MPI and other programs use the name: have it added to DNS or /etc/hosts",
        )
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in names.resolved):
        return warning(
            f"{names.host} resolves to {', '.join(names.resolved)} only, its loopback",
            "programs that announce this name cannot be reached from other machines: have /etc/hosts changed, or name "
            "an interface by --interface",
        )
    return ok(f"{names.host}: {addresses}")


LOGIN_CHECKS: tuple[Check, ...] = (
    Check("job request", "request", lambda result: result),
    Check("Python", "python", check_python),
    Check("Python's folder", "environment", check_environment),
    Check("home", "home", check_home),
    Check("scratch", "scratch", check_scratch),
    Check("limits", "limits", check_limits),
    Check("locked memory", "limits", check_locked_memory),
    Check("time", "home", check_time),
    Check("names", "names", check_names),
)
