"""The facts of a run that each rank reads or makes before the rendezvous: its job, its settings, the run's layout.

They are named tuples: importing dataclasses takes 15 CPU ms (Python 3.11: it imports inspect), and each dataclass
another one.
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


class NodeLayout(NamedTuple):
    """Ranks and workers of one node."""

    node: int
    ranks: tuple[int, ...]  # global, ascending; the first is the leader
    # For each rank the positions of its workers in the node's plan, GPU by GPU; empty for idle ranks, and for the
    # scheduler's rank if other ranks are beside it.
    workers: tuple[tuple[int, ...], ...]
    cpu_workers: int = 0  # workers without a GPU, at the end of the plan

    @property
    def leader(self) -> int:
        """The rank that owns the node's processes."""
        return self.ranks[0]

    @property
    def worker_count(self) -> int:
        """Number of workers of all its ranks."""
        return sum(map(len, self.workers))

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks without a worker, except rank 0 (the scheduler)."""
        return tuple(r for r, w in zip(self.ranks, self.workers, strict=True) if not w and r != 0)


class Layout(NamedTuple):
    """The nodes of the run; rank 0 is the scheduler."""

    nodes: tuple[NodeLayout, ...]

    @property
    def worker_count(self) -> int:
        """Number of workers of all nodes."""
        return sum(n.worker_count for n in self.nodes)

    def node_of(self, rank: int) -> NodeLayout:
        """Return the node on which ``rank`` runs."""
        return next(n for n in self.nodes if rank in n.ranks)


class World(NamedTuple):
    """The number of ranks and nodes."""

    nodes: int = 1
    per_node: int = 1  # ranks on each node
    extra: bool = True  # one more rank on the first node, for the scheduler
    hosts: tuple[str, ...] = ()  # names of the nodes; empty: the launcher knows them
    variables: tuple[str, ...] = ()  # names to forward to ranks on other nodes; empty: the launcher forwards them
    as_root: bool = False

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.per_node + self.extra


class BootstrapSettings(NamedTuple):
    """How the ranks meet, and the settings that the layout needs, under their names in Settings."""

    workers_per_gpu: int
    cpu_workers: int
    rendezvous: str
    death_timeout_s: float
    shape: str
    folder: str
    launch: str
    exit_file: str
    gpus: str | None = None
    gpus_per_node: int | None = None


# Fields of the run document; the others are settings.
OWN = frozenset({"shape", "folder", "launch", "exit_file"})
# Settings that each document has, even with default values, unless they are None.
WRITTEN = frozenset(BootstrapSettings._fields) - OWN
