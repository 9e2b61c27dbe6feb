"""The doctor in a job: ranks are started; each node gathers facts, connects to the others, and writes into a folder."""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import psutil

from hpcgpu import config
from hpcgpu.deploy import start
from hpcgpu.deploy.doctor import probes
from hpcgpu.deploy.network import lease
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import discover, host_memory, limits, nvml, peer_memory, private, process
from hpcgpu.host import run as programs
from hpcgpu.host.scratch import home_of
from hpcgpu.launch.launchers import RankCommand
from hpcgpu.model import Command, CpuSet, Result, RunDocument, Settings, Topology
from hpcgpu.plan.doctor.facts import Launcher, Link, NodeFacts
from hpcgpu.plan.doctor.nodes import NOT_SHARED

# Files in the folder of the job.
_ORDER, LAUNCHER, CONNECTED = "order", "launcher", "connected"
LISTENS, NODE = "listens-", "node-"  # with the node's name
Content = TypeVar("Content")
CONNECT_S, _ALL_S = 3.0, 30.0
TRIES = 3  # the fastest of them counts: the other machine may be at work
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
        self.endpoints = tuple(Endpoint(*place, port) for place in probes.interfaces() if both or ":" not in place[1])
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
    links, errors = probes.gather(looks, _ALL_S)
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


def write_value(folder: Path, name: str, value: object) -> None:
    """Write facts into the job's folder, atomically."""
    private.write(folder / name, msgspec.json.encode(value).decode())


def write_order(folder: Path, settings: Settings) -> str:
    """Write the nodes' task, a run document whose ``launch`` is the secret of this job; return the secret."""
    token = secrets.token_hex(16)
    private.write(folder / _ORDER, config.render_document(RunDocument(settings=settings, launch=token)))
    return token


def read_order(folder: Path) -> RunDocument:
    """Read the nodes' task; raise HpcGpuError if the folder is missing, because the home is not shared."""
    try:
        return config.read_document(private.read(folder / _ORDER))
    except FileNotFoundError as e:
        raise HpcGpuError(f"{os.uname().nodename} has no {folder}: {NOT_SHARED}, or the doctor has ended") from e


def read_all(folder: Path, prefix: str, kind: type[Content]) -> dict[str, Content]:
    """Read the facts in the files of this prefix, by the rest of their names: the node that has written them."""
    paths = sorted(folder.glob(f"{prefix}*"))
    return {path.name.removeprefix(prefix): msgspec.json.decode(private.read(path), type=kind) for path in paths}


def read_listening(folder: Path) -> dict[str, tuple[Endpoint, ...]]:
    """Read the endpoints of the nodes that listen, by host."""
    return read_all(folder, LISTENS, tuple[Endpoint, ...])


def on_nodes(folder: Path) -> int:
    """Have each node of this job gather its facts; return the launcher's exit code, or raise HpcGpuError."""
    settings = read_order(folder).settings
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
    if not argv or settings.rendezvous == "file" or command.by_file:
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
    with contextlib.closing(Listener(order.launch)) as listener:
        write_value(folder, f"{LISTENS}{host}", listener.endpoints)
        facts = gather_facts(order.settings)
        met = _until(lambda: len(read_listening(folder)) >= order.settings.nodes)
        others = [place for place in read_listening(folder).items() if place[0] != host]
        links = [link for other, endpoints in others for link in connect_all(other, endpoints, order.launch)]
        write_value(folder, f"{NODE}{host}", replace(facts, links=tuple(links)))
        if met:
            connected = folder / CONNECTED
            _until(lambda: connected.exists() and len(read_all(folder, NODE, NodeFacts)) >= order.settings.nodes)
    return 0


def gather_facts(settings: Settings) -> NodeFacts:
    """Gather this node's facts."""
    checks: dict[str, Callable[[], Any]] = {
        "scratch": lambda: probes.folder(home_of(settings.local_directory), _WRITE_BYTES),
        "ucx": probes.ucx,
        "topology": discover.topology,
        "imports": probes.imports,
    }
    results, unknown = probes.gather(checks, _PROBES_S)
    topology: Topology | None = results.get("topology")
    broken, import_s = results.get("imports", ("", 0.0))
    gpus = nvml.read()
    return NodeFacts(
        host=os.uname().nodename,
        python=replace(probes.python(), broken=broken, import_s=import_s),
        limits=limits.read(),
        cpus=len(os.sched_getaffinity(0)),
        cores=psutil.cpu_count() or 0,
        memory_bytes=host_memory.memory_limit(topology.gpu_memory_nodes if topology else CpuSet()).nbytes,
        temporary=tempfile.gettempdir(),
        gpus=tuple(gpu.model for gpu in gpus.gpus),
        compute_modes=tuple(gpu.compute_mode for gpu in gpus.gpus),
        driver=nvml.driver(),
        no_driver=gpus.trouble,
        nvlink_domain=nvml.nvlink_domain(),
        imex_channel=probes.imex_channel(),
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
