"""Frozen values that check themselves: standard library only, no I/O.

Names are loaded at their first use (PEP 562): making a dataclass takes a millisecond, and a member rank needs two.
"""

from __future__ import annotations

from hpcgpu.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcgpu.model.allocation import Allocation, BindingRules, CpuSet, HostMemory, Layout, NodeLayout, RankFacts
    from hpcgpu.model.job import Command, JobSpec, JobState, JobStatus, Offer, Result, Started
    from hpcgpu.model.run_document import RunDocument
    from hpcgpu.model.settings import Settings
    from hpcgpu.model.site import Site
    from hpcgpu.model.topology import Binding, Gpu, Hop, Nic, NumaNode, Topology
    from hpcgpu.model.waits import Patience
    from hpcgpu.model.worker import ActualBinding, WorkerSpec

_NAMES = {
    "allocation": "Allocation BindingRules CpuSet HostMemory Layout NodeLayout RankFacts",
    "job": "Command JobSpec JobState JobStatus Offer Result Started",
    "run_document": "RunDocument",
    "settings": "Settings",
    "site": "Site",
    "topology": "Binding Gpu Hop Nic NumaNode Topology",
    "waits": "Patience",
    "worker": "ActualBinding WorkerSpec",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcgpu.model' has no attribute {name!r}")
    import importlib  # not at the top: hpcgpu bind does without

    globals()[name] = getattr(importlib.import_module(f"hpcgpu.model.{_HOMES[name]}"), name)
    return globals()[name]
