"""The facts of the login node, and its checks."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hpcgpu.model.allocation import Limits
from hpcgpu.plan.doctor.facts import Folder, Names, Python, TrialFacts
from hpcgpu.plan.doctor.findings import Check, CheckResult, Verdict, failed, ok, warning
from hpcgpu.plan.jobs.needs import Size, needs, shortages
from hpcgpu.units import counted, format_bytes

_ROOM_BYTES, _ROOM_FILES = 1 << 30, 10_000
_SLOW_CREATE_S, _SLOW_BYTES_PER_S = 0.1, 20e6
_FILES, _PROCESSES, _LOCKED_BYTES = 4096, 1024, 1 << 30
_CLOCK_S = 1.0
# Slurm: "Invalid account or account/partition combination specified", "invalid partition specified: x"; OpenPBS:
# "Unknown queue". The account is matched first: Slurm's message on it names the partition, too.
_ACCOUNT = re.compile(r"account|association|project|bank", re.I)
_QUEUE = re.compile(r"partition|queue|qos", re.I)
IMPORTANT = ("hpcgpu", "dask", "distributed")


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
    size: CheckResult | None = None  # of looking whether limits allow the cluster
    start: CheckResult | None = None  # of looking where its nodes import from
    unknown: Mapping[str, str] = field(default_factory=dict)


def confirmed(facts: LoginFacts, trial: TrialFacts) -> LoginFacts:
    """Return the facts with the job's results: it was accepted, its nodes have the home and this Python."""
    request, home, environment = facts.request, facts.home, facts.environment
    if request and request.verdict is not Verdict.OK:
        request = ok(f"it took job {trial.job_id}")
    if len(trial.nodes) >= trial.requested_nodes:
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
    if python.broken:
        return failed(f"{python.path} has {python.broken}", f"{python.path} -m pip install 'NAME>=VERSION'")
    text = f"Python {python.version} for {python.machine} with {versions}"
    if "free-threaded" in python.version:
        return warning(text, "hpcgpu does not support free-threaded builds: take one with the GIL (without the t)")
    return ok(text)


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
    trouble = _check_folder(home, "a run's processes find each other by files there")
    if home.network or (trouble and trouble.verdict is Verdict.FAILED):
        return trouble or ok(_describe(home))
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
    raised = f"ulimit -u {_PROCESSES} in the shell, and in jobs by --job-script-prologue 'ulimit -u {_PROCESSES}'"
    for name, value, least, advice in (
        ("open files", limits.files, _FILES, "ask the administrators for a higher hard limit, which hpcgpu takes"),
        ("processes", limits.processes, _PROCESSES, f"{raised}; ask the administrators if it is refused"),
    ):
        if 0 <= value < least:
            return warning(summary, f"a scheduler with many workers needs more {name}: {advice}")
    return ok(summary)


def judge_size(size: Size, limits: Limits, *, is_certain: bool) -> CheckResult:
    """Check that limits allow a cluster of this size; ``is_certain``: they are those of its scheduler."""
    exact, others = (shortages(size, limits, exact=exact) for exact in (True, False))
    if not exact and not others:
        counts = [f"{number} {name}" for name, number, _ in (need.texts for need in needs(size, limits))]
        return ok(f"{counted(size.workers, 'worker')} need {', '.join(counts)}")
    result = failed if exact and is_certain else warning
    return result(
        "; ".join((*exact, *others)),
        "ask the administrators for a higher limit on the nodes (limits.conf; LimitNOFILE and LimitNPROC of slurmd or "
        "pbs_mom), or start fewer workers",
    )


def judge_start(imported: str) -> CheckResult:
    """Check that the nodes do not all read the environment from one file server."""
    if not imported:
        return ok("few nodes, or an environment on no network file system that is known here")
    return warning(imported, "--environment stage has each node copy the environment once, to its own disk")


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
    Check("size of the cluster", "size", lambda result: result),
    Check("start of the nodes", "start", lambda result: result),
    Check("locked memory", "limits", check_locked_memory),
    Check("time", "home", check_time),
    Check("names", "names", check_names),
)
