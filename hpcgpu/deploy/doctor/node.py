"""The doctor in a job: start ranks; on each node gather facts, listen, connect to the others, write the facts."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcgpu.config import document
from hpcgpu.deploy import start
from hpcgpu.deploy.doctor import connect, probes
from hpcgpu.deploy.doctor.connect import Listener, connect_all
from hpcgpu.deploy.network import lease
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import cgroup, discover, nvml, peer_memory, process
from hpcgpu.host import run as programs
from hpcgpu.launch.launcher import RankCommand
from hpcgpu.model import Command, Result, Settings, Topology
from hpcgpu.plan.doctor.facts import Launcher, NodeFacts
from hpcgpu.spill.storage.scratch import home_of

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
    settings = document.read(connect.read_order(folder).run).settings
    silent_s = settings.client_grace_s
    if not lease.is_held(folder, silent_s):
        raise HpcGpuError(f"the doctor that submitted this job has given no sign of life for {silent_s:g} s")
    connect.write(folder, connect.LAUNCHER, _start_ranks(settings))
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
    """Gather this node's facts and connections until all others have connected; HpcGpuError without a shared home."""
    order, host = connect.read_order(folder), os.uname().nodename
    with contextlib.closing(Listener(order.token)) as listener:
        connect.write(folder, f"{connect.LISTENS}{host}", listener.endpoints)
        facts = gather_facts(document.read(order.run).settings)
        met = _until(lambda: len(connect.read_listening(folder)) >= order.nodes)
        others = [place for place in connect.read_listening(folder).items() if place[0] != host]
        links = [link for other, endpoints in others for link in connect_all(other, endpoints, order.token)]
        connect.write(folder, f"{connect.NODE}{host}", replace(facts, links=tuple(links)))
        if met:
            connected = folder / connect.CONNECTED
            _until(lambda: connected.exists() and len(connect.read_nodes(folder)) >= order.nodes)
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
    cpus, cores = probes.cpus()
    gpus = nvml.read()
    return NodeFacts(
        host=os.uname().nodename,
        python=replace(probes.python(), broken=broken, import_s=import_s),
        limits=probes.limits(),
        cpus=cpus,
        cores=cores,
        memory_bytes=cgroup.memory_limit().nbytes,
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
