"""The needs of a cluster by its size, beside the limits: one fact for the plan, the doctor, rank 0 and scale()."""

from __future__ import annotations

from typing import NamedTuple, Self

from hpcgpu.model.allocation import Layout, Limits
from hpcgpu.units import format_bytes

# Counted in local clusters of 2 and 6 simulated GPUs that ran tasks, the memory with 4,000 simulated workers
# (docs/explanation/scale.md). Of the scheduler: connections of each worker, and one of each node's leader; other files;
# memory.
_CONNECTIONS, _FILES = 2, 16
_MEMORY_BYTES, _WORKER_BYTES = 64 << 20, (50 << 20) // 1000
# Of a node: threads of each worker of one task thread, without a GPU's libraries, and of the others; ports.
_THREADS, _MORE_THREADS = 4, 7
_PORTS, _MORE_PORTS = 4, 3
# Slurm sends the soft limits of the shell along, and the hard ones of the node's daemon stay (slurmstepd's ulimits.c at
# d7146275; PropagateResourceLimits in slurm.conf(5)). PBS sends none. So limits of a login node forbid no job.
OF_NODES = " here; nodes may have another one, and rank 0 checks its own before it starts workers"
_MANY_NODES, _IMPORTED = 16, 880  # files of a leader that were opened (strace), without the libraries of GPUs


class Size(NamedTuple):
    """A cluster at its largest."""

    workers: int
    nodes: int = 1
    per_node: int = 0  # workers of a node

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Return the size of a run of this layout."""
        return cls(layout.worker_count, len(layout.nodes), max((n.worker_count for n in layout.nodes), default=0))


class Need(NamedTuple):
    """A need of one process or node, and its limit."""

    name: str
    number: int
    limit: int = -1  # -1: none, or unknown
    limit_name: str = ""
    unit: str = ""  # B: bytes
    is_exact: bool = False  # below it the cluster cannot work; other numbers depend on libraries and work

    @property
    def is_short(self) -> bool:
        """True if a limit is too low."""
        return 0 <= self.limit < self.number

    @property
    def texts(self) -> tuple[str, str, str]:
        """The need, its number and its limit, for people."""
        number, limit = (format_bytes(n) if self.unit else f"{n:,}" for n in (self.number, self.limit))
        return self.name, number, "-" if self.limit < 0 else f"{limit}, {self.limit_name}"


def needs(size: Size, limits: Limits) -> tuple[Need, ...]:
    """Count what a cluster needs, each number beside its limit."""
    connections = _CONNECTIONS * size.workers + size.nodes
    files, threads = _FILES + connections, _MORE_THREADS + _THREADS * size.per_node
    of_user = [limit for limit in (limits.processes, limits.job_processes) if limit >= 0]
    memory_bytes = _MEMORY_BYTES + _WORKER_BYTES * size.workers
    return (
        Need("open files of the scheduler", files, limits.files, "hard limit (ulimit -Hn)", is_exact=True),
        Need("connections of the scheduler", connections),
        Need("memory of the scheduler", memory_bytes, unit="B"),
        Need("processes and threads of a node", threads, min(of_user, default=-1), "limit (ulimit -u, pids.max)"),
        Need("ports of a node", _MORE_PORTS + _PORTS * size.per_node, limits.ports, "range (ip_local_port_range)"),
    )


def shortages(size: Size, limits: Limits, *, exact: bool | None = None) -> tuple[str, ...]:
    """Return a text for each limit that is too low; ``exact``: only of needs that are exact, or that are not."""
    workers = f"{size.workers:,} worker{'s need' if size.workers != 1 else ' needs'}"
    return tuple(
        f"{workers} {need.number:,} {need.name}; the {need.limit_name} is {need.limit:,}"
        for need in needs(size, limits)
        if need.is_short and exact in (None, need.is_exact)
    )


def shared_imports(nodes: int, file_system: str) -> str:
    """Describe the start of so many nodes from an environment on a network file system; "" for few nodes."""
    return f"{nodes} nodes import at least {_IMPORTED} files each from {file_system}" if nodes >= _MANY_NODES else ""
