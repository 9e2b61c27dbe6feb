"""The spill store: device → host → disk, for a worker's data.

Any distributed worker can have it: ``Worker(data=(hpcgpu.spill.GpuSpillBuffer, {"memory_limit": "8GB"}))``.
"""

from hpcgpu.spill.store import GpuSpillBuffer as GpuSpillBuffer
