"""A rank's facts from its environment, before MPI starts: its job and its rank.

Named tuples, as in the layout: each rank makes them. Importing dataclasses takes 15 CPU ms (Python 3.11: it imports
inspect), and each dataclass another one.
"""

from __future__ import annotations

from typing import NamedTuple

# PBS has no variables for a job's number of nodes, how often it was requeued, and its granted memory: these are ours.
JOB_NODES, JOB_RESTARTS, JOB_MEMORY = "HPCGPU_JOB_NODES", "HPCGPU_JOB_RESTARTS", "HPCGPU_GRANTED_MEMORY"
# The address of the ranks' scheduler; set only in a script that runs under ranks.
SCRIPT_ADDRESS = "HPCGPU_SCRIPT_SCHEDULER"
# The path of the private file that holds the dashboard's address.
SCRIPT_DASHBOARD = "HPCGPU_SCRIPT_DASHBOARD"
# The names of all variables by which that script's Client() finds the scheduler, with commas between.
SCRIPT_ENV = "HPCGPU_SCRIPT_ENV"


# HostMemory.source if the job has no memory limit.
ALL_OF_THE_NODE = "all of this node"
# HostMemory.source if the size is unknown: the machine comes from a file without sizes.
NOT_TOLD = "the file has no memory sizes"


class RankFacts(NamedTuple):
    """The rank and local rank of this process, as its launcher numbers them."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None  # within the node, as local_size; None: the launcher does not set it
    local_size: int | None = None
    launcher: str = "none"  # Open MPI mpirun, MPICH mpiexec, PALS mpiexec or srun; none: a plain process
    mpi_type: str = ""  # Slurm's --mpi= of this step, else empty


class HostMemory(NamedTuple):
    """The host memory that a job may use on one node."""

    nbytes: int
    source: str  # of the number, in words

    @property
    def has_size(self) -> bool:
        """True if a source gives the size."""
        return self.source != NOT_TOLD


class Allocation(NamedTuple):
    """The job around this process."""

    batch: str = "local"  # slurm, pbs, or local: no job
    # as the batch system's commands take it, of an array's element 123_4 or 123[4].server; without a batch system the
    # value of HPCGPU_JOB_ID
    job_id: str = ""
    restart_count: int = 0
    node_count: int = 1
    node_name: str = ""
    gpus_per_node: int | None = None
    memory: HostMemory | None = None  # of this node, granted by the batch system; None: all of it, or unknown
    rank: RankFacts = RankFacts()
