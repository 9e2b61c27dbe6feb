"""What a rank knows from its environment, before MPI: the job it is in and its place in the world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank's place, in the launcher's words.

    Attributes
    ----------
    launcher : str
        ``Open MPI mpirun``, ``MPICH mpiexec``, ``PALS mpiexec``, ``srun``, or ``none`` for a plain process.
    local_rank, local_size : int or None
        Place within the node; None when the launcher does not say.
    mpi_type : str
        Slurm's ``--mpi=`` of this step, else empty.

    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    launcher: str = "none"
    mpi_type: str = ""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The job around this process; ``batch`` is ``slurm``, ``pbs`` or ``local`` (no job)."""

    batch: str = "local"
    job_id: str = ""
    restart_count: int = 0
    node_count: int = 1
    node_name: str = ""
    gpus_per_node: int | None = None
    memory_per_node_bytes: int | None = None
    rank: RankFacts = RankFacts()
