"""The ranks that are to be started."""

from __future__ import annotations

from dataclasses import dataclass

# The variable by which a script knows that ranks run it, and where their scheduler is.
SCRIPT_ADDRESS = "HPCGPU_SCRIPT_SCHEDULER"


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
        Names of the nodes, where the launcher must be told; empty where it knows.
    variables : tuple of str
        Names of the variables that the ranks on other nodes are to have, too; empty where the launcher sees to it.

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
