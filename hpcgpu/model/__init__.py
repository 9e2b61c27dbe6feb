"""Floor 1, the nouns: frozen values that check themselves. Standard library only, no I/O.

Names are loaded at their first use (PEP 562): a rank that only takes part in the rendezvous needs two of them, and
making a dataclass takes a millisecond.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcgpu.model.allocation import Allocation as Allocation
    from hpcgpu.model.allocation import CpuSet as CpuSet
    from hpcgpu.model.allocation import HostMemory as HostMemory
    from hpcgpu.model.allocation import Layout as Layout
    from hpcgpu.model.allocation import NodeLayout as NodeLayout
    from hpcgpu.model.allocation import RankFacts as RankFacts
    from hpcgpu.model.command import Command as Command
    from hpcgpu.model.command import Patience as Patience
    from hpcgpu.model.command import Result as Result
    from hpcgpu.model.command import Started as Started
    from hpcgpu.model.job import JobSpec as JobSpec
    from hpcgpu.model.job import JobState as JobState
    from hpcgpu.model.job import JobStatus as JobStatus
    from hpcgpu.model.job import Offer as Offer
    from hpcgpu.model.job import RunDocument as RunDocument
    from hpcgpu.model.settings import Settings as Settings
    from hpcgpu.model.site import Site as Site
    from hpcgpu.model.topology import ActualBinding as ActualBinding
    from hpcgpu.model.topology import Binding as Binding
    from hpcgpu.model.topology import Gpu as Gpu
    from hpcgpu.model.topology import Hop as Hop
    from hpcgpu.model.topology import Nic as Nic
    from hpcgpu.model.topology import NumaNode as NumaNode
    from hpcgpu.model.topology import Topology as Topology
    from hpcgpu.model.topology import WorkerSpec as WorkerSpec

_NAMES = {
    "allocation": ("Allocation", "CpuSet", "HostMemory", "Layout", "NodeLayout", "RankFacts"),
    "command": ("Command", "Patience", "Result", "Started"),
    "job": ("JobSpec", "JobState", "JobStatus", "Offer", "RunDocument"),
    "settings": ("Settings",),
    "site": ("Site",),
    "topology": (*("ActualBinding", "Binding", "Gpu", "Hop", "Nic", "NumaNode", "Topology", "WorkerSpec"),),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcgpu.model' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hpcgpu.model.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
