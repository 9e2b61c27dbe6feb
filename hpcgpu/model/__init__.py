"""Frozen values that check themselves: standard library only, no I/O."""

# Names are loaded at their first use (PEP 562): a rank that only takes part in the rendezvous needs two of them, and
# making a dataclass takes a millisecond.

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcgpu.model.allocation import Allocation, BindingRules, CpuSet, HostMemory, Layout, NodeLayout, RankFacts
    from hpcgpu.model.job import Command, JobSpec, JobState, JobStatus, Offer, Patience, Result, RunDocument, Started
    from hpcgpu.model.settings import Settings
    from hpcgpu.model.site import Site
    from hpcgpu.model.topology import Binding, Gpu, Hop, Nic, NumaNode, Topology
    from hpcgpu.model.worker import ActualBinding, WorkerSpec

_NAMES = {
    "allocation": "Allocation BindingRules CpuSet HostMemory Layout NodeLayout RankFacts",
    "job": "Command JobSpec JobState JobStatus Offer Patience Result RunDocument Started",
    "settings": "Settings",
    "site": "Site",
    "topology": "Binding Gpu Hop Nic NumaNode Topology",
    "worker": "ActualBinding WorkerSpec",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcgpu.model' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hpcgpu.model.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
