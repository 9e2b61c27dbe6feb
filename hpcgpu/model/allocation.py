"""The facts that a rank has from its environment, before MPI: its job, and its rank.

Named tuples, as in the layout: each rank makes them. Importing dataclasses takes 15 CPU ms (Python 3.11: it imports
inspect), and each dataclass another one.
"""

from __future__ import annotations

from typing import NamedTuple

# Our variables for what PBS tells a job in none: the number of its nodes, how often it was requeued, and the memory
# that it was granted.
JOB_NODES, JOB_RESTARTS, JOB_MEMORY = "HPCGPU_JOB_NODES", "HPCGPU_JOB_RESTARTS", "HPCGPU_GRANTED_MEMORY"
# The variable that tells a script that it runs under ranks, and the address of their scheduler.
SCRIPT_ADDRESS = "HPCGPU_SCRIPT_SCHEDULER"
# And the path of the private file in which the dashboard's address stands.
SCRIPT_DASHBOARD = "HPCGPU_SCRIPT_DASHBOARD"
# The names of all variables by which that script's Client() finds the scheduler, with commas between.
SCRIPT_ENV = "HPCGPU_SCRIPT_ENV"


# The source of a limit that is none: nothing limits this job.
ALL_OF_THE_NODE = "all of this node"
# The source of an unknown size: a machine of a file without sizes.
NOT_TOLD = "the file tells no memory size"


class RankFacts(NamedTuple):
    """A rank's number and local number, in the launcher's words.

    Attributes
    ----------
    launcher : str
        ``Open MPI mpirun``, ``MPICH mpiexec``, ``PALS mpiexec``, ``srun``, or ``none`` for a plain process.
    local_rank, local_size : int or None
        Rank and size within the node; None if the launcher does not tell.
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
    """Host memory that a job may use on one node, and the source of that number in words."""

    nbytes: int
    source: str

    @property
    def known(self) -> bool:
        """False if no source tells a size."""
        return self.source != NOT_TOLD


class Allocation(NamedTuple):
    """The job around this process.

    Attributes
    ----------
    batch : str
        ``slurm``, ``pbs`` or ``local`` (no job).
    job_id : str
        As the batch system's commands take it; for an element of an array ``123_4``, ``123[4].server``. Without a batch
        system the value of ``HPCGPU_JOB_ID``.
    memory : HostMemory or None
        The memory of this node that the batch system grants; None: all of it, or unknown.

    """

    batch: str = "local"
    job_id: str = ""
    restart_count: int = 0
    node_count: int = 1
    node_name: str = ""
    gpus_per_node: int | None = None
    memory: HostMemory | None = None
    rank: RankFacts = RankFacts()
