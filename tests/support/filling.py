"""A spill store that is given more than it may keep up."""

from __future__ import annotations

import numpy as np

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer


def fill(store: GpuSpillBuffer, gpu: SimGpu, count: int = 40) -> None:
    """Set ``count`` keys of 8 KiB each on the device, of which each byte is the key."""
    for i in range(count):
        store[i] = gpu.asarray(np.full(8 << 10, i, "u1"))
