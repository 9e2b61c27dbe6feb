"""The ranks to start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
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
