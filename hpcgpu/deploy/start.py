"""From words to ranks: what the commands and the cluster classes have in common."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcgpu.config import document
from hpcgpu.deploy import settings
from hpcgpu.host import allocator, gpus, process
from hpcgpu.host import run as programs
from hpcgpu.launch import srun
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Allocation, Command, RunDocument, Settings
from hpcgpu.model.simulated import parse_simulated
from hpcgpu.model.world import World
from hpcgpu.plan.launcher import Found, Launch, plan_launch

_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def agent_argv(run: RunDocument) -> tuple[str, ...]:
    """Return the command of one rank."""
    return (run.settings.python or sys.executable, "-m", "hpcgpu.agent", document.render(run))


def run(given: Mapping[str, object], given_from: str, script: tuple[str, ...]) -> None:
    """Become one rank of a run; does not return.

    Raises
    ------
    ConfigError
        A setting is wrong.

    """
    wanted = settings.read(given, given_from)
    argv = agent_argv(RunDocument(settings=wanted.settings, script=script))
    process.execute(argv, {**os.environ, **process.image_env(os.environ, preload(wanted.settings))})


def launch(given: Mapping[str, object], given_from: str, script: tuple[str, ...]) -> None:
    """Start the ranks of a run in this allocation, or on this machine; does not return.

    Raises
    ------
    ConfigError, LaunchError
        A setting is wrong, or no launcher fits.

    """
    wanted = settings.read(given, given_from)
    _execute(RunDocument(settings=wanted.settings, script=script))


def preload(wanted: Settings) -> str:
    """Return the library to preload for the allocator that is wanted; say on the first rank when there is none."""
    library = allocator.find_jemalloc(os.environ) if wanted.allocator == "jemalloc" else ""
    if wanted.allocator == "jemalloc" and not library and not read_allocation(os.environ).rank.rank:
        print(f"hpcgpu: {allocator.NOT_FOUND}", file=sys.stderr, flush=True)
    return library


def launch_document(text: str) -> None:
    """Start the ranks of a cluster object's job; does not return."""
    _execute(document.read(text))


def launch_line(given: Mapping[str, object], given_from: str, typed: tuple[str, ...]) -> str:
    """Return the line that :func:`launch` runs, with ``hpcgpu run`` and what was typed for each rank."""
    wanted = settings.read(given, given_from)
    own = Path(sys.executable).with_name("hpcgpu")  # not another environment's that stands first in PATH
    planned = _plan((str(own), "run", *typed), wanted.settings)
    return shlex.join([*(f"{name}={value}" for name, value in planned.env), *planned.argv])


def local_argv(run: RunDocument) -> tuple[str, ...]:
    """Return the command that starts a run's ranks on this machine alone: one process, or mpirun if that is wanted."""
    chosen = replace(run.settings, launcher=run.settings.launcher or "fork")
    return _plan(agent_argv(run), chosen, allocation=Allocation()).argv


def node_argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that runs ``argv`` once on each node of this job; it needs no MPI."""
    return _plan(argv, Settings(ranks="node", rendezvous="file")).argv


def _execute(run: RunDocument) -> None:
    added = process.image_env(os.environ, preload(run.settings))
    launcher = _plan(agent_argv(run), run.settings, tuple(f"{k}={v}" for k, v in added.items()))
    program = shutil.which(launcher.argv[0]) or launcher.argv[0]
    process.execute((program, *launcher.argv[1:]), {**os.environ, **added, **dict(launcher.env)})


def _plan(
    argv: tuple[str, ...], wanted: Settings, variables: tuple[str, ...] = (), allocation: Allocation | None = None
) -> Launch:
    """Return the launcher's command; mpirun does not bring variables to other nodes, so each rank is given them."""
    allocation = allocation or read_allocation(os.environ)
    hosts = _pbs_hosts() if allocation.batch == "pbs" else ()
    world = World(
        nodes=len(hosts) or allocation.node_count,
        hosts=hosts,
        per_node=_ranks_per_node(wanted, allocation),
        extra=wanted.ranks == "gpu",
        as_root=os.getuid() == 0,
    )
    each = ("env", *variables, *argv) if variables and world.nodes > 1 else argv
    return plan_launch(each, wanted, allocation, _find(wanted, allocation), world)


def _pbs_hosts() -> tuple[str, ...]:
    """Return the job's nodes, each once, in their order; PBS has no variable that counts them."""
    path = os.environ.get("PBS_NODEFILE")
    return tuple(dict.fromkeys(Path(path).read_text().split())) if path else ()


def _ranks_per_node(wanted: Settings, allocation: Allocation) -> int:
    if wanted.ranks == "node":
        return 1
    simulated = parse_simulated(wanted.gpus).count if wanted.gpus else None
    return wanted.gpus_per_node or simulated or allocation.gpus_per_node or len(gpus.nvml_facts()[0]) or 1


def _find(wanted: Settings, allocation: Allocation) -> Found:
    """Look for launchers, as far as somebody may want them."""
    if wanted.launcher == "fork" or (wanted.launcher is None and allocation.batch == "local"):
        return Found()
    beside = Path(sys.executable).parent / "mpirun"
    program = str(beside) if beside.exists() else shutil.which("mpirun") or shutil.which("mpiexec") or ""
    version = programs.run_sync(Command((program, "--version"), timeout_s=20)).stdout if program else ""
    if allocation.batch != "slurm":
        return Found(mpirun=program, mpirun_version=version)
    listed = programs.run_sync(srun.LIST)
    library = programs.run_sync(Command((sys.executable, "-c", _LIBRARY), timeout_s=60)).stdout
    types = srun.read_mpi_types(listed.stdout + listed.stderr)
    return Found(
        mpirun=program, mpirun_version=version, mpi_types=types, library=library.splitlines()[0] if library else ""
    )
