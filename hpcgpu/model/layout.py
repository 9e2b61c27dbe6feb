"""The layout of a run: the ranks of each node, and their workers."""

from __future__ import annotations

from typing import NamedTuple


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
