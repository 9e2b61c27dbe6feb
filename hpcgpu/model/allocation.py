"""What a rank knows from its environment, before MPI: the job it is in and its place in the world.

Named tuples, as in the layout: every rank makes them, and importing dataclasses takes 15 CPU ms (Python 3.11: it
brings inspect), each of its classes another one.
"""

from __future__ import annotations

from typing import NamedTuple

# Variables of ours in a job of PBS, which has none for it: its nodes, how often it was started again, and the memory
# that it was granted.
JOB_NODES, JOB_RESTARTS, JOB_MEMORY = "HPCGPU_JOB_NODES", "HPCGPU_JOB_RESTARTS", "HPCGPU_JOB_MEMORY"


# The source of a limit that is none: nobody limits this job.
ALL_OF_THE_NODE = "all of this node"
# The source where nobody knows: a machine of a file that tells no sizes.
NOT_TOLD = "the file tells no memory size"


class RankFacts(NamedTuple):
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


class HostMemory(NamedTuple):
    """Host memory that a job may use on one node, and what says so, in words."""

    nbytes: int
    source: str

    @property
    def known(self) -> bool:
        """False where no source tells a size."""
        return self.source != NOT_TOLD


class Allocation(NamedTuple):
    """The job around this process.

    Attributes
    ----------
    batch : str
        ``slurm``, ``pbs`` or ``local`` (no job).
    job_id : str
        As the batch system's commands take it, of the element where the job is one of an array: ``123_4``,
        ``123[4].server``; without a batch system what ``HPCGPU_JOB_ID`` says.
    memory : HostMemory or None
        What the batch system grants of this node; None: all of it, or it does not say.

    """

    batch: str = "local"
    job_id: str = ""
    restart_count: int = 0
    node_count: int = 1
    node_name: str = ""
    gpus_per_node: int | None = None
    memory: HostMemory | None = None
    rank: RankFacts = RankFacts()
