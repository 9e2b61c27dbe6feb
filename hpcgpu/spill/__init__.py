"""The spill store: device → host → disk, for a worker's data.

Any distributed worker can have it: ``Worker(data=(hpcgpu.spill.GpuSpillBuffer, {"memory_limit": "8GB"}))``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgpu.spill.store.buffer import GpuSpillBuffer as GpuSpillBuffer
    from hpcgpu.spill.values import contents as contents

__all__ = ["GpuSpillBuffer", "contents"]


def __getattr__(name: str) -> Any:
    if name == "GpuSpillBuffer":  # brings numpy, which code that needs only a folder does without
        from hpcgpu.spill.store.buffer import GpuSpillBuffer

        return GpuSpillBuffer
    if name == "contents":
        from hpcgpu.spill.values import contents

        return contents
    raise AttributeError(f"module 'hpcgpu.spill' has no attribute {name!r}")
