"""The ranks that are to be started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How many ranks, over how many nodes.

    Attributes
    ----------
    per_node : int
        Ranks on each node.
    extra : bool
        One rank more on the first node, for the scheduler.
    hosts : tuple of str
        Names of the nodes, if the launcher needs them; empty if it knows them.
    variables : tuple of str
        Names of the variables to forward to ranks on other nodes; empty if the launcher forwards them.

    """

    nodes: int = 1
    per_node: int = 1
    extra: bool = True
    hosts: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    as_root: bool = False

    @property
    def size(self) -> int:
        """All ranks."""
        return self.nodes * self.per_node + self.extra
