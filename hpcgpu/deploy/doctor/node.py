"""The doctor in a job: ranks are started; each node gathers facts, connects to the others, and writes into a folder."""

from __future__ import annotations

import contextlib
import hmac
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import psutil

from hpcgpu import __version__, config
from hpcgpu.deploy import start
from hpcgpu.deploy.network import lease
from hpcgpu.errors import HpcGpuError, LaunchError
from hpcgpu.host import discover, host_memory, nvml, peer_memory, private, process
from hpcgpu.host import run as programs
from hpcgpu.host import ucx as host_ucx
from hpcgpu.host.scratch import home_of, mount_of
from hpcgpu.launch import RankCommand
from hpcgpu.model import Command, Result, Settings, Topology
from hpcgpu.plan.doctor.facts import Folder, Launcher, Limits, Link, Names, NodeFacts, Python, Ucx
from hpcgpu.plan.doctor.nodes import NOT_SHARED

_PACKAGES = (
    *("dask", "distributed", "numpy", "msgspec", "cupy", "cupy-cuda12x", "cupy-cuda13x", "cudf", "rmm"),
    *("torch", "numba", "ucxx", "ucxx-cu12", "ucxx-cu13", "distributed-ucxx", "mpi4py"),
)
_SMALL_FILES = 8
# Importing these shows whether the packages' machine code runs on this CPU.
_IMPORTS = "import numpy, msgspec, psutil, distributed"
_TOO_LATE = 124


def gather(looks: Mapping[str, Callable[[], Any]], limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Run probes at once, ``limit_s`` seconds together; return their results, and the errors of the others."""
    # A late probe goes on in a daemon thread: calls on a hung file system cannot be cancelled.
    seen: dict[str, Any] = {}
    why: dict[str, str] = {}

    def look(name: str, function: Callable[[], Any]) -> None:
        try:
            seen[name] = function()
        except Exception as error:  # any error is reported, and the other probes go on
            why[name] = str(error) or type(error).__name__

    threads = [threading.Thread(target=look, args=item, daemon=True) for item in looks.items()]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    late = {name: f"no answer in {limit_s:g} s" for name in looks if name not in seen and name not in why}
    return dict(seen), {**why, **late}


def limits() -> Limits:
    """Return this process's soft limits."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    files, processes, locked_bytes = (resource.getrlimit(kind)[0] for kind in kinds)  # Linux's RLIM_INFINITY is -1
    return Limits(files=files, processes=processes, locked_bytes=locked_bytes)


def names() -> Names:
    """Return this machine's name, the addresses it resolves to, and its interfaces' addresses."""
    host, resolved = socket.gethostname(), dict[str, None]()
    with contextlib.suppress(OSError):
        resolved = dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None))
    return Names(host=host, resolved=tuple(resolved), interfaces=interfaces())


def interfaces() -> tuple[tuple[str, str], ...]:
    """Return (interface, address) of all addresses that other nodes can reach, by interface."""
    pairs: list[tuple[str, str]] = []
    for name in sorted(discover.usable_interfaces()):
        with contextlib.suppress(LaunchError):  # loopback, or an address that is valid on its link only
            pairs += ((name, each) for each in discover.reachable_addresses(("0.0.0.0", "::"), name))
    return tuple(pairs)


def python() -> Python:
    """Return this Python, and the versions of packages that a cluster's workers must share."""
    packages = {"hpcgpu": __version__}  # of what runs: a checkout in PYTHONPATH has no metadata
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    version, machine = platform.python_version(), platform.machine()
    return Python(path=sys.executable, version=version, machine=machine, packages=packages)


def imports() -> tuple[str, float]:
    """Import the packages in a process (20 s at most); return the error, "" if none, and the seconds it took."""
    began_s = time.perf_counter()
    done = programs.run_sync(Command((sys.executable, "-c", _IMPORTS), timeout_s=20.0))
    took_s, why = time.perf_counter() - began_s, ""
    if done.returncode < 0:
        why = f"an import ended with signal {-done.returncode}: packages are built for another CPU"
    elif done.returncode not in (0, _TOO_LATE):
        why = (done.stderr.strip().splitlines() or [f"an import ended with {done.returncode}"])[-1]
    return why, took_s


def mounted(path: Path) -> Folder:
    """Return a folder and the kind of its file system."""
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    mount = mount_of(os.fspath(path.resolve()), text)
    if mount is None:
        return Folder(path=str(path))
    return Folder(path=str(path), kind=mount.kind, network=mount.is_network, memory=mount.is_memory)


def folder(path: Path, write_bytes: int) -> Folder:
    """Measure a folder's free space and speed by small files and a synced one of ``write_bytes``; remove them."""
    about = os.statvfs(path)
    free_bytes, free_files = about.f_bavail * about.f_frsize, about.f_favail if about.f_files else -1
    folder = replace(mounted(path), free_bytes=free_bytes, free_files=free_files)
    if free_bytes < 2 * write_bytes:
        return folder
    try:
        with tempfile.TemporaryDirectory(prefix=".hpcgpu-doctor-", dir=path) as scratch:
            return _measured(folder, Path(scratch), write_bytes)
    except OSError as error:
        return replace(folder, error=error.strerror or str(error))


def _measured(about: Folder, folder: Path, write_bytes: int) -> Folder:
    before_s, began_s = time.time(), time.perf_counter()
    for number in range(_SMALL_FILES):
        (folder / str(number)).write_bytes(b"")
    server_s, after_s = (folder / "0").stat().st_mtime, time.time()
    for number in range(_SMALL_FILES):
        (folder / str(number)).unlink()
    create_s = (time.perf_counter() - began_s) / _SMALL_FILES
    began_s = time.perf_counter()
    with (folder / "large").open("wb", buffering=0) as file:
        file.write(os.urandom(write_bytes))
        os.fsync(file.fileno())
    speed = write_bytes / (time.perf_counter() - began_s)
    # file systems round times down, some to seconds; between the two moments nothing is wrong
    skew = server_s - before_s if server_s < before_s - 1 else max(0.0, server_s - after_s)
    return replace(about, create_s=create_s, bytes_per_s=speed, clock_s=skew)


def ucx() -> Ucx:
    """Return version and transports of the workers' UCX, else of PATH's ucx_info; RuntimeError if it fails."""
    folder = host_ucx.library(os.environ)
    beside = folder and folder.parent / "bin" / "ucx_info"
    program = str(beside) if beside and beside.exists() else shutil.which("ucx_info")
    # an ucx_info of another UCX reads this one, too: each has the interfaces of its libraries
    env = {"LD_LIBRARY_PATH": str(folder)} if folder else {}
    if not program:
        raise RuntimeError("there is no ucx_info here")
    done = programs.run_sync(Command((program, "-v", "-d"), env=env, timeout_s=15.0))
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ucx_info ended with {done.returncode}"])[-1])
    read = read_ucx_info(done.stdout)
    return replace(read, folder=str(folder or ""), has_ib=folder is None or host_ucx.drives_infiniband(folder))


def read_ucx_info(text: str) -> Ucx:
    """Parse the output of ``ucx_info -v -d`` into version and transports."""
    version = re.search(r"Library version: *(\S+)", text)
    found = (line.partition("Transport:")[2].strip() for line in text.splitlines() if "Transport:" in line)
    return Ucx(version=version[1] if version else "", transports=tuple(sorted(set(found))))


# Files in the folder of the job.
ORDER, LAUNCHER, CONNECTED = "order", "launcher", "connected"
LISTENS, NODE = "listens-", "node-"  # with the node's name
Content = TypeVar("Content")
CONNECT_S, _ALL_S = 3.0, 30.0
TRIES = 3  # the fastest of them counts: the other machine may be at work


class Endpoint(NamedTuple):
    """An address at which a machine listens."""

    interface: str
    address: str
    port: int


class Listener:
    """Listens on all addresses of this machine until :meth:`close`, and sends its time to peers that know the token."""

    def __init__(self, token: str) -> None:
        self._token, both = token.encode(), socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        port = int(self._socket.getsockname()[1])
        self.endpoints = tuple(Endpoint(*place, port) for place in interfaces() if both or ":" not in place[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT_S)
                if hmac.compare_digest(connection.recv(len(self._token), socket.MSG_WAITALL), self._token):
                    connection.sendall(f"{time.time():.6f}\n".encode())

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._socket.close()


def connect_all(host: str, endpoints: tuple[Endpoint, ...], token: str) -> tuple[Link, ...]:
    """Connect to a machine at each of its addresses, at once."""
    looks = {place.address: partial(connect, host, place, token) for place in endpoints}
    links, errors = gather(looks, _ALL_S)
    return tuple(links.get(p.address) or _link(host, p, error=errors[p.address]) for p in endpoints)


def connect(host: str, endpoint: Endpoint, token: str) -> Link:
    """Connect TRIES times to a machine's Listener; return a failed attempt at once, or else the fastest."""
    links = []
    for _ in range(TRIES):
        began_s, before_s = time.perf_counter(), time.time()
        try:
            with socket.create_connection(endpoint[1:], timeout=CONNECT_S) as sock, sock.makefile() as answers:
                sock.sendall(token.encode())
                line = answers.readline()
            took_s = time.perf_counter() - began_s
            links.append(_link(host, endpoint, took_s=took_s, clock_s=float(line) - before_s - took_s / 2))
        except OSError as error:
            return _link(host, endpoint, error=str(error.strerror or error))
        except ValueError:
            return _link(host, endpoint, error="another program listens there")
    return min(links, key=lambda link: link.took_s)


def _link(host: str, endpoint: Endpoint, **more: Any) -> Link:
    interface, address, _ = endpoint
    return Link(source=os.uname().nodename, target=host, interface=interface, address=address, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The nodes' task."""

    token: str  # a secret of this job
    nodes: int
    run: str  # a run document


def write_value(folder: Path, name: str, value: object) -> None:
    """Write facts into the job's folder, atomically."""
    private.write(folder / name, msgspec.json.encode(value).decode())


def read_order(folder: Path) -> Order:
    """Read the nodes' task; raise HpcGpuError if the folder is missing, because the home is not shared."""
    try:
        return msgspec.json.decode(private.read(folder / ORDER), type=Order)
    except FileNotFoundError as e:
        raise HpcGpuError(f"{os.uname().nodename} has no {folder}: {NOT_SHARED}, or the doctor has ended") from e


def read_all(folder: Path, prefix: str, kind: type[Content]) -> dict[str, Content]:
    """Read the facts in the files of this prefix, by the rest of their names: the node that has written them."""
    paths = sorted(folder.glob(f"{prefix}*"))
    return {path.name.removeprefix(prefix): msgspec.json.decode(private.read(path), type=kind) for path in paths}


def read_listening(folder: Path) -> dict[str, tuple[Endpoint, ...]]:
    """Read the endpoints of the nodes that listen, by host."""
    return read_all(folder, LISTENS, tuple[Endpoint, ...])


_MEET_S = 30.0  # for the other nodes to come, and for the login node to have connected
_PROBES_S = 25.0  # for all probes of a node together: imports on a cold file system
_WRITE_BYTES = 64 << 20
_POLL_S = 0.1
_NODES_S = 120.0
_RANKS_S = 25.0
_MARK = "hpcgpu-doctor-rank"
_RANK = (
    f"from mpi4py import MPI; print('{_MARK}', MPI.COMM_WORLD.size, "
    "MPI.Get_library_version().splitlines()[0].split(',')[0], flush=True)"
)
_RANK_LINE = re.compile(rf"{_MARK} (\d+) (.*)")
_OUTPUT_LINES = 4


def on_nodes(folder: Path) -> int:
    """Have each node of this job gather its facts; return the launcher's exit code, or raise HpcGpuError."""
    settings = config.read_document(read_order(folder).run).settings
    silent_s = settings.client_grace_s
    if not lease.is_held(folder, silent_s):
        raise HpcGpuError(f"the doctor that submitted this job has given no sign of life for {silent_s:g} s")
    write_value(folder, LAUNCHER, _start_ranks(settings))
    argv = process.python_argv("hpcgpu", "doctor", "--on-node", str(folder))
    done = _run(start.plan_ranks(argv, Settings(ranks="node", rendezvous="file")), _NODES_S)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def _start_ranks(settings: Settings) -> Launcher:
    """Start ranks in this job, which must meet in one MPI world; return the command and its result."""
    try:
        command = start.plan_ranks(("true",), settings)
    except HpcGpuError as error:
        return Launcher(error=str(error))
    argv = command.argv[:-1]  # without the rank's own command
    if not argv or settings.rendezvous == "file":
        return Launcher(command=shlex.join(argv))
    done = _run(command._replace(argv=(*argv, sys.executable, "-c", _RANK)), _RANKS_S)
    ranks = _RANK_LINE.findall(done.stdout)
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if re.search(r"\w", line)]
    return Launcher(
        command=shlex.join(argv),
        library=ranks[0][1].strip() if ranks else "",
        worlds=tuple(int(size) for size, _ in ranks),
        exit_code=done.returncode,
        output=" / ".join(lines[:_OUTPUT_LINES]),
    )


def _run(command: RankCommand, limit_s: float) -> Result:
    """Run a launcher's command, its session folder as in a run: Open MPI takes no TMPDIR as long as many are."""
    with tempfile.TemporaryDirectory(prefix="hpcgpu-doctor-", dir="/tmp") as folder:
        env = {**dict(command.env), **command.within(folder, os.environ)}
        return programs.run_sync(Command(command.argv, env=env, timeout_s=limit_s))


def on_node(folder: Path) -> int:
    """Gather this node's facts and connections until all others have connected; HpcGpuError without a shared home."""
    order, host = read_order(folder), os.uname().nodename
    with contextlib.closing(Listener(order.token)) as listener:
        write_value(folder, f"{LISTENS}{host}", listener.endpoints)
        facts = gather_facts(config.read_document(order.run).settings)
        met = _until(lambda: len(read_listening(folder)) >= order.nodes)
        others = [place for place in read_listening(folder).items() if place[0] != host]
        links = [link for other, endpoints in others for link in connect_all(other, endpoints, order.token)]
        write_value(folder, f"{NODE}{host}", replace(facts, links=tuple(links)))
        if met:
            connected = folder / CONNECTED
            _until(lambda: connected.exists() and len(read_all(folder, NODE, NodeFacts)) >= order.nodes)
    return 0


def gather_facts(settings: Settings) -> NodeFacts:
    """Gather this node's facts."""
    checks: dict[str, Callable[[], Any]] = {
        "scratch": lambda: folder(home_of(settings.local_directory), _WRITE_BYTES),
        "ucx": ucx,
        "topology": discover.topology,
        "imports": imports,
    }
    results, unknown = gather(checks, _PROBES_S)
    topology: Topology | None = results.get("topology")
    broken, import_s = results.get("imports", ("", 0.0))
    gpus = nvml.read()
    return NodeFacts(
        host=os.uname().nodename,
        python=replace(python(), broken=broken, import_s=import_s),
        limits=limits(),
        cpus=len(os.sched_getaffinity(0)),
        cores=psutil.cpu_count() or 0,
        memory_bytes=host_memory.memory_limit().nbytes,
        temporary=tempfile.gettempdir(),
        gpus=tuple(gpu.model for gpu in gpus.gpus),
        compute_modes=tuple(gpu.compute_mode for gpu in gpus.gpus),
        driver=nvml.driver(),
        no_driver=gpus.trouble,
        # of Slurm only, which sets no variable for none; None for PBS, which has no variable
        granted_gpus=int(os.environ.get("SLURM_GPUS_ON_NODE") or 0) if "SLURM_JOB_ID" in os.environ else None,
        nics=topology.nics if topology else None,
        hops=topology.hops if topology else (),
        scratch=results.get("scratch"),
        ucx=results.get("ucx"),
        copy_obstacle=peer_memory.obstacle(),
        unknown={**unknown, "nics": unknown.get("topology", "")},
    )


def _until(is_true: Callable[[], bool]) -> bool:
    """Poll the shared folder until ``is_true``, or too late: a file on another machine sends no signal."""
    end_s = time.monotonic() + _MEET_S
    while not (result := is_true()) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return result
