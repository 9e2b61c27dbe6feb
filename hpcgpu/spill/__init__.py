"""The spill store: device → host → disk, for a worker's data.

Any distributed worker can have it, without the rest of hpcgpu::

    store = (GpuSpillBuffer, {"memory_limit": "8GB"})
    LocalCluster(data=store, plugins=[SpillPlugin()])  # or preload=["hpcgpu.spill.preload"]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgpu.spill.distributed.plugin import SpillPlugin as SpillPlugin
    from hpcgpu.spill.store.buffer import GpuSpillBuffer as GpuSpillBuffer
    from hpcgpu.spill.values.containers import contents as contents

__all__ = ["GpuSpillBuffer", "SpillPlugin", "contents"]


# These bring numpy, or distributed, which code that needs only a folder does without.
_LATE = {
    "GpuSpillBuffer": "hpcgpu.spill.store.buffer",
    "SpillPlugin": "hpcgpu.spill.distributed.plugin",
    "contents": "hpcgpu.spill.values.containers",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'hpcgpu.spill' has no attribute {name!r}")
