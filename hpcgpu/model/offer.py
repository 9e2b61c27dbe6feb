"""What a batch system has: :class:`Offer`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Nodes of one kind in a queue. None: not known, or without a limit.

    Attributes
    ----------
    nodes : int
        How many there are, also those that are down.
    gpus, cpus : int or None
        Of each.
    memory_bytes : int or None
        Of each.
    most_nodes : int or None
        That the queue gives to one job.
    walltime_s : int or None
        The queue's time limit.

    """

    queue: str
    nodes: int
    gpus: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    most_nodes: int | None = None
    walltime_s: int | None = None
