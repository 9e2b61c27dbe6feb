"""A rank's place in the world, from the variables that launchers and batch systems set.

Recorded from Open MPI 4.1.4 and 5.0.11, MPICH 5.0.2 and Slurm 22.05; PALS as its mpiexec(1) says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcgpu.model import Allocation, HostMemory, RankFacts
from hpcgpu.model.allocation import JOB_MEMORY, JOB_NODES, JOB_RESTARTS

# (launcher, rank, size, local rank, local size). The order matters: under mpirun inside a Slurm job the
# SLURM_* variables are there too, and are those of mpirun's own daemon (rank 1 of 4 had SLURM_PROCID=0).
_LAUNCHERS = (
    (
        "Open MPI mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PALS mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("MPICH mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# What is each launch's own. PALS: as Slurm's cray_shasta plugin, which takes its place, has it.
_LAUNCHES = {
    "Open MPI mpirun": ("PMIX_NAMESPACE",),
    "PALS mpiexec": ("PALS_APID",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}
# What is set, by which option, and the variable that counts what it is for.
_SLURM_MEMORY = (
    ("SLURM_MEM_PER_NODE", "--mem", ""),
    ("SLURM_MEM_PER_CPU", "--mem-per-cpu", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "--mem-per-gpu", "SLURM_GPUS_ON_NODE"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_A_LAUNCHER = ("OMPI_", "PRTE_", "PMIX_", "PMI_", "HYDRA_", "PALS_", "PBS_", "BASH_FUNC_")
_OF_A_PROCESS = frozenset(("_", "PWD", "OLDPWD", "SHLVL", "HOSTNAME", "NCPUS"))


def read_rank(environ: Mapping[str, str]) -> RankFacts:
    """Return the place of the process with this environment; rank 0 of 1 when no launcher started it."""
    for launcher, rank, size, local_rank, local_size in _LAUNCHERS:
        if rank not in environ or size not in environ:
            continue
        if launcher == "srun" and "SLURM_STEP_ID" not in environ:
            continue  # the batch script itself: SLURM_PROCID is 0 there, and no step promised a world
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
    """Return what all ranks of this launch have in common, and no other launch has; empty where nothing is.

    A job's id is not it, for a job may start ranks twice; MPICH's mpiexec gives its ranks nothing of the kind.
    """
    names = _LAUNCHES.get(read_rank(environ).launcher, ())
    return ".".join(environ[name] for name in names if name in environ).replace("/", "_")


def read_allocation(environ: Mapping[str, str], host: str = "") -> Allocation:
    """Return the job around the process with this environment.

    Parameters
    ----------
    environ : mapping
        The process's environment.
    host : str
        This node's own name, which tells its memory where PBS has granted more of one node than of another.

    """
    rank = read_rank(environ)
    if "SLURM_JOB_ID" in environ:
        return Allocation(
            batch="slurm",
            job_id=_slurm_id(environ),
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
            # PBS has no variables for these: the job's script counts, hpcgpu launch counts and asks
            restart_count=_int(environ, JOB_RESTARTS) or 0,
            node_count=_int(environ, JOB_NODES) or 1,
            memory=_pbs_memory(environ, host),
            rank=rank,
        )
    return Allocation(job_id=environ.get("HPCGPU_JOB_ID", ""), rank=rank)


def _slurm_memory(environ: Mapping[str, str]) -> HostMemory | None:
    """Return what this step, or this job, may use of its node, whether or not a cgroup holds it to that.

    One of the three at most is set ("mutually exclusive", srun(1)), in MiB; ``--mem=0``, all of the node, sets none,
    and a step with an option of its own has that (22.05.8).
    """
    for name, option, counted in _SLURM_MEMORY:
        each, count = _int(environ, name), _int(environ, counted) if counted else 1
        if each and count:
            times = f" with {counted}={count}" if counted else ""
            return HostMemory(each * count << 20, f"{option} of the job: {name}={each}{times}")
    return None


def render_memory(granted: Mapping[str, int]) -> str:
    """Return the bytes that a job of PBS is granted of each host as ``JOB_MEMORY`` has them; empty for none."""
    if len(set(granted.values())) < 2:
        return "".join(map(str, set(granted.values())))
    return ",".join(f"{host}={nbytes}" for host, nbytes in granted.items())


def _pbs_memory(environ: Mapping[str, str], host: str) -> HostMemory | None:
    """Return what is granted of this host.

    PBS may know a host by another name than its own: of one that is not found, it is the least of all.
    """
    said = [word.rpartition("=") for word in environ.get(JOB_MEMORY, "").split(",")]
    granted = {name.partition(".")[0]: int(nbytes) for name, _, nbytes in said if nbytes.isdigit()}
    nbytes = granted.get(host.partition(".")[0], min(filter(None, granted.values()), default=0))
    return HostMemory(nbytes, f"mem= of PBS job {environ['PBS_JOBID']}") if nbytes else None


def _slurm_id(environ: Mapping[str, str]) -> str:
    """Return the id under which the job is asked for: an array's elements have raw ids, too, which nobody lists."""
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else environ["SLURM_JOB_ID"]


def is_isolated(environ: Mapping[str, str]) -> bool:
    """Tell whether each rank has devices of its own, so that no rank may start workers for another.

    ``--gpus-per-task`` and ``--gpu-bind`` give every task its own device cgroup (Slurm 22.05: each step
    numbers its GPUs from 0, CUDA_VISIBLE_DEVICES=0 in every rank, on different devices).
    """
    # What slurmd did, which tells it also where the option was srun's alone: no SLURM_GPUS_PER_TASK then (22.05.8).
    bound = environ.get("SLURMD_TRES_BIND", "").partition("gpu:")[2] or environ.get("SLURM_GPU_BIND", "")
    if bound:
        return not bound.removeprefix("verbose,").startswith("none")
    return bool(environ.get("SLURM_GPUS_PER_TASK"))


def brought(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of what a job's script has set for all of its nodes, where no launcher brings it there.

    A task of PBS starts with ``PATH=/bin:/usr/bin`` and little else (OpenPBS 23.06.06). Not brought is what each
    node has of its own: the UUIDs of its GPUs in CUDA_VISIBLE_DEVICES (cgroups hook), a folder that is this job's.
    """
    job = environ.get("PBS_JOBID") or None

    def is_common(name: str, value: str) -> bool:
        if not _NAME.fullmatch(name) or name in _OF_A_PROCESS or name.startswith(_OF_A_LAUNCHER):
            return False
        if name == "CUDA_VISIBLE_DEVICES":
            return "-" not in value
        return not (name == "TMPDIR" and job and job in value)

    return tuple(sorted(name for name, value in environ.items() if is_common(name, value)))


def _int(environ: Mapping[str, str], name: str) -> int | None:
    """Return a number, also of Slurm's ``gpu:4`` and ``4(x2)``."""
    digits = environ.get(name, "").split(":")[-1].split("(")[0]
    return int(digits) if digits.isdigit() else None
