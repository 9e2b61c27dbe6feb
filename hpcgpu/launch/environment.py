"""A rank's place in the world, from the variables that launchers and batch systems set.

Recorded from Open MPI 4.1.4 and 5.0.11, MPICH 5.0.2 and Slurm 22.05; PALS as its mpiexec(1) says.
"""

from __future__ import annotations

from collections.abc import Mapping

from hpcgpu.model import Allocation, RankFacts

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


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the job around the process with this environment."""
    rank = read_rank(environ)
    if "SLURM_JOB_ID" in environ:
        memory_mib = _int(environ, "SLURM_MEM_PER_NODE")
        return Allocation(
            batch="slurm",
            job_id=environ["SLURM_JOB_ID"],
            restart_count=_int(environ, "SLURM_RESTART_COUNT") or 0,
            node_count=_int(environ, "SLURM_JOB_NUM_NODES") or 1,
            node_name=environ.get("SLURMD_NODENAME", ""),
            gpus_per_node=_int(environ, "SLURM_GPUS_PER_NODE"),
            memory_per_node_bytes=memory_mib << 20 if memory_mib else None,
            rank=rank,
        )
    if "PBS_JOBID" in environ:
        return Allocation(batch="pbs", job_id=environ["PBS_JOBID"], rank=rank)
    return Allocation(rank=rank)


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


def _int(environ: Mapping[str, str], name: str) -> int | None:
    """Return a number, also of Slurm's ``gpu:4`` and ``4(x2)``."""
    digits = environ.get(name, "").split(":")[-1].split("(")[0]
    return int(digits) if digits.isdigit() else None
