"""The doctor in a job: start ranks; on each node gather facts, listen, connect to the others, write the facts."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcgpu.config import document
from hpcgpu.deploy import start
from hpcgpu.deploy.doctor import node_checks, shared_files, ucx_link
from hpcgpu.deploy.doctor.shared_files import CERTIFICATE, Listening, Order
from hpcgpu.deploy.network import lease
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import probes, process
from hpcgpu.host import run as programs
from hpcgpu.host.knocking import Answer, Endpoint, Listener, probe_often
from hpcgpu.model import Command, Result, Settings
from hpcgpu.plan.doctor.facts import Launcher, Link
from hpcgpu.plan.jobs.launcher import RankCommand

_MEET_S = 30.0  # for the other nodes to come, and for the login node to have knocked
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


def knock(source: str, target: Listening, order: Order, folder: Path) -> tuple[Link, ...]:
    """Connect to a machine at each of its addresses, by TCP and then by TLS: its handshakes keep a CPU busy."""
    links: list[Link] = []
    for protocol in ("tcp", "tls"):
        places = [place for place in target.where if place.protocol == protocol]
        knocks = {
            str(i): partial(probe_often, place, order.token, folder / CERTIFICATE) for i, place in enumerate(places)
        }
        answers, errors = probes.gather(knocks, _MEET_S)
        answers |= {i: Answer(error=text) for i, text in errors.items()}
        links += [_link(source, target, place, answers[str(i)]) for i, place in enumerate(places)]
    return tuple(links)


def _link(source: str, target: Listening, place: Endpoint, answer: Answer) -> Link:
    where: dict[str, Any] = {"interface": place.interface, "address": place.address, "protocol": place.protocol}
    return Link(source=source, target=target.host, **where, **answer._asdict())


def on_nodes(folder: Path) -> int:
    """Have each node of this job gather its facts; return the launcher's exit code, or raise HpcGpuError."""
    settings = document.read(shared_files.read_order(folder).run).settings
    silent_s = settings.client_grace_s
    if not lease.is_held(folder, silent_s):
        raise HpcGpuError(f"the doctor that submitted this job has given no sign of life for {silent_s:g} s")
    shared_files.write(folder, shared_files.LAUNCHER, _start_ranks(settings))
    done = _run(start.node_launch(process.python_argv("hpcgpu", "doctor", "--on-node", str(folder))), _NODES_S)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def _start_ranks(settings: Settings) -> Launcher:
    """Start ranks in this job, which must meet in one MPI world; return the command and its result."""
    try:
        command = start.ranks_launch(settings)
    except HpcGpuError as error:
        return Launcher(error=str(error))
    argv = command.argv[:-1]  # without the rank's own command
    if not argv or settings.rendezvous == "file":
        return Launcher(command=shlex.join(argv))
    done = _run(replace(command, argv=(*argv, sys.executable, "-c", _RANK)), _RANKS_S)
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
    """Gather this node's facts and connections until all others have knocked; HpcGpuError without a shared home."""
    order, host = shared_files.read_order(folder), os.uname().nodename
    with contextlib.closing(Listener(order.token, folder / CERTIFICATE)) as listener, contextlib.ExitStack() as stack:
        port, no_ucx = 0, "one node only" if order.nodes < 2 else ""
        if not no_ucx:
            try:
                port = stack.enter_context(ucx_link.served(order.token))
            except RuntimeError as error:
                no_ucx = str(error)
        # UCX uses IPv4, at all addresses
        plain = [place for place in listener.where if port and place.protocol == "tcp" and "." in place.address]
        where = (*listener.where, *(Endpoint(p.interface, p.address, port, "ucx") for p in plain))
        listening = Listening(host=host, where=where, no_ucx=no_ucx)
        shared_files.write(folder, f"{shared_files.LISTENS}{host}", listening)
        facts = node_checks.gather_facts(document.read(order.run).settings)
        met = _until(lambda: len(shared_files.read_listening(folder)) >= order.nodes)
        others = [other for other in shared_files.read_listening(folder) if other.host != host]
        links = [link for other in others for link in knock(host, other, order, folder)]
        ucx_links, no_ucx_links = _knock_by_ucx(host, others, order, no_ucx)
        facts = replace(facts, links=(*links, *ucx_links), no_ucx_links=no_ucx_links)
        shared_files.write(folder, f"{shared_files.NODE}{host}", facts)
        if met:
            knocked = folder / shared_files.KNOCKED
            _until(lambda: knocked.exists() and len(shared_files.read_nodes(folder)) >= order.nodes)
    return 0


def _knock_by_ucx(source: str, others: Sequence[Listening], order: Order, why_not: str) -> tuple[list[Link], str]:
    """Connect to the others by UCX; return the links, or why no connection was tried."""
    pairs = [(other, place) for other in others for place in other.where if place.protocol == "ucx"]
    if why_not or not pairs:
        return [], why_not or next((other.no_ucx for other in others), "no other node has come")
    try:
        answers = ucx_link.knock_all([place for _, place in pairs], order.token)
    except RuntimeError as error:
        answers = (Answer(error=str(error)),) * len(pairs)
    return [_link(source, *pair, answer) for pair, answer in zip(pairs, answers, strict=True)], ""


def _until(is_true: Callable[[], bool]) -> bool:
    """Poll the shared folder until ``is_true``, or too late: a file on another machine sends no signal."""
    end_s = time.monotonic() + _MEET_S
    while not (result := is_true()) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    return result
