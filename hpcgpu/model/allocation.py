"""The facts that each rank reads before the rendezvous: its job, the layout, simulated GPUs, PUs, rules of binding.

They are named tuples: importing dataclasses takes 15 CPU ms (Python 3.11: it imports inspect), and each dataclass
another one.

Together: the rendezvous needs all of them, and one module is one import.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcgpu.errors import ConfigError
from hpcgpu.light_typing import NamedTuple
from hpcgpu.units import format_bytes, meant, parse_bytes

# PBS has no variables for a job's number of nodes, how often it was requeued, its granted memory, and its end (in
# seconds since the epoch): these are ours.
JOB_NODES, JOB_RESTARTS, JOB_MEMORY = "HPCGPU_JOB_NODES", "HPCGPU_JOB_RESTARTS", "HPCGPU_GRANTED_MEMORY"
# A rank that pbs_tmrsh started, without an MPI, has its number and the number of ranks in these.
TASK = ("HPCGPU_TASK_RANK", "HPCGPU_TASK_SIZE")
# The run document, for `hpcgpu launch` in a job and for each rank: any user of a node can read the words of a command.
DOCUMENT = "HPCGPU_DOCUMENT"
JOB_END = "HPCGPU_JOB_END"
# The address of the ranks' scheduler; set only in a script that runs under ranks.
SCRIPT_ADDRESS = "HPCGPU_SCRIPT_SCHEDULER"
# The path of the private file that holds the dashboard's address.
SCRIPT_DASHBOARD = "HPCGPU_SCRIPT_DASHBOARD"
# The names of all variables by which that script's Client() finds the scheduler, with commas between.
SCRIPT_ENV = "HPCGPU_SCRIPT_ENV"
# The pid of its rank 0, from which all processes of the run on this node descend.
SCRIPT_LEADER = "HPCGPU_SCRIPT_LEADER"
# HostMemory.source if the job has no memory limit.
ALL_OF_THE_NODE = "all of this node"
# HostMemory.source if the size is unknown: the machine comes from a file without sizes.
NOT_TOLD = "the file has no memory sizes"
# Fields of the run document; the others are settings.
OWN = frozenset({"shape", "folder", "launch", "exit_file"})
NO_GPU = "in a job, request GPUs from the batch system; without GPUs simulate them by the option gpus, as sim:4"
_MOST_PUS = 1 << 20  # Linux has 8,192; a larger number is a slip, whose set would fill the memory
DEFAULT_BYTES = 256 << 20  # the demo's: small enough for a laptop's memory, and for a 1.6 GB array on four to spill
_SMALLEST_BARE = 1 << 20  # a number below without a unit is a slip
_DIGITS = 4  # at most, of a number of simulated GPUs


class RankFacts(NamedTuple):
    """The rank and local rank of this process, as its launcher numbers them."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None  # within the node, as local_size; None: the launcher does not set it
    local_size: int | None = None
    launcher: str = "none"  # Open MPI mpirun, MPICH mpiexec, PALS mpiexec, srun or pbs_tmrsh; none: a plain process
    mpi_type: str = ""  # Slurm's --mpi= of this step, else empty


class HostMemory(NamedTuple):
    """The host memory that a job may use on one node."""

    nbytes: int
    source: str  # of the number, in words

    @property
    def has_size(self) -> bool:
        """True if a source gives the size."""
        return self.source != NOT_TOLD


class Limits(NamedTuple):
    """Limits of a process and of its user; -1: unlimited, or unknown."""

    files: int = -1  # open descriptors: the hard limit, since hpcgpu raises the soft one to it
    processes: int = -1  # and threads, of this user on this node
    locked_bytes: int = -1
    job_processes: int = -1  # and threads, of this process's cgroups: pids.max
    ports: int = -1  # of outgoing connections to one address: ip_local_port_range


class BindingRules(NamedTuple):
    """The settings of a plan, with their defaults: making all settings takes 20 CPU ms, which a rank need not spend."""

    workers_per_gpu: int = 1
    cores: str | int = "all"
    reserved_cores: int = 0
    nthreads: int = 1
    memory_policy: str = "preferred-many"
    nics: str | tuple[str, ...] = "balanced"
    interface: str | None = None


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
    document: bool = False  # the ranks' document is to be forwarded, too

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.per_node + self.extra

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all variables to forward."""
        return (*self.variables, DOCUMENT) if self.document else self.variables


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


# Settings that each document has, even with default values, unless they are None.
WRITTEN = frozenset(BootstrapSettings._fields) - OWN


class SimulatedGpus(NamedTuple):
    """The number of simulated GPUs on each node, and the memory of each."""

    per_node: int
    memory_bytes: int = DEFAULT_BYTES


def parse_simulated(text: str, prefix: str = "sim:") -> SimulatedGpus:
    """Parse ``4`` or ``4x256MiB`` after ``prefix``; raise ConfigError for other text, no GPU, or no memory."""
    allowed = f"allowed: '{prefix}4', or '{prefix}4x256MiB': 4 simulated GPUs on each node, of 256 MiB each"
    count, x, size = text.removeprefix(prefix).partition("x")
    if not text.startswith(prefix) or not count.isdecimal() or len(count) > _DIGITS or (x and not size):
        raise ConfigError(f"{text!r} does not describe simulated GPUs; {allowed}")
    try:
        memory = parse_bytes(size) if size else DEFAULT_BYTES
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    if int(count) < 1 or memory < 1:
        raise ConfigError(f"{text!r} has no GPU, or GPUs without memory; {allowed}")
    if memory < _SMALLEST_BARE and size and (hint := meant(size)):
        raise ConfigError(f"{text!r} has GPUs of {format_bytes(memory)}{hint}; {allowed}")
    return SimulatedGpus(int(count), memory)


class CpuSet(frozenset[int]):
    """A frozen set of OS indices: ``CpuSet.parse("0-3,8")``; ``str(cpuset) == "0-3,8"``.

    >>> CpuSet.parse("0-3,8") & CpuSet([2, 3, 9])
    CpuSet('2-3')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """Parse the list format of Linux and Slurm: ``0-3,8``, with optional ``:stride``."""
        out: set[int] = set()
        for part in filter(None, text.strip().split(",")):
            span, _, stride = part.partition(":")
            low, dash, high = span.partition("-")
            if int(high if dash else low) >= _MOST_PUS:
                raise ValueError(f"{part} is above all indices of a machine")
            out.update(range(int(low), int(high if dash else low) + 1, int(stride or 1)))
        return cls(out)

    @classmethod
    def from_mask(cls, mask: str) -> CpuSet:
        """Parse hwloc's mask format, 32-bit words, most significant first: ``0x1,0x0000ffff``."""
        numbers = [int(word or "0", 16) for word in mask.split(",")]
        return cls(
            32 * k + i for k, word in enumerate(reversed(numbers)) for i in range(word.bit_length()) if word >> i & 1
        )

    def __and__(self, other: Iterable[object]) -> CpuSet:
        return type(self)(self.intersection(other))

    def __str__(self) -> str:
        spans: list[list[int]] = []
        for i in sorted(self):
            if spans and spans[-1][1] == i - 1:
                spans[-1][1] = i
            else:
                spans.append([i, i])
        return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)

    def __repr__(self) -> str:
        return f"CpuSet({str(self)!r})"
