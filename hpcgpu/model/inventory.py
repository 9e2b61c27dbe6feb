"""A machine's queues and nodes, as its batch system reports them, for the draft of a site file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpcgpu.model.site_facts import NodeType, Queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Queues and nodes with GPUs, as the batch system reports them."""

    batch: str  # slurm or pbs
    queues: tuple[Queue, ...] = ()  # with GPU nodes, or with unknown nodes
    nodes: Mapping[str, NodeType] = field(default_factory=dict)  # types of nodes with GPUs, by name
    default: str = ""  # the default queue; empty: none, or unknown
    gpu_type: str = ""  # of all GPUs, if Slurm's gres have a single type
    array_limit: int | None = None  # the most elements of an array; None: unknown
    silent: tuple[str, ...] = ()  # programs without an answer, with their messages
