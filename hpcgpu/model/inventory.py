"""A machine's own words about itself, for the draft of a site file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcgpu.model.site_facts import NodeType, Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Queues and nodes with GPUs, in the batch system's words.

    Attributes
    ----------
    batch : str
        ``slurm`` or ``pbs``.
    queues : tuple of Queue
        Those that have nodes with GPUs, or of which it is not known.
    nodes : Mapping of str to NodeType
        Types of nodes with GPUs.
    default : str
        The default queue; empty: none, or unknown.
    gpu_type : str
        The type of all GPUs, if Slurm's gres have one and the same; empty otherwise.
    array_limit : int or None
        The most elements of an array; None: unknown.
    silent : tuple of str
        Programs that gave no answer, with their words.

    """

    batch: str
    queues: tuple[Queue, ...] = ()
    nodes: Mapping[str, NodeType] = field(default_factory=dict)
    default: str = ""
    gpu_type: str = ""
    array_limit: int | None = None
    silent: tuple[str, ...] = ()
