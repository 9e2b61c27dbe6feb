"""Simulated GPUs: to try hpcgpu, to plan for a machine, to teach, and to test without a GPU.

``hpcgpu.sim.register()`` registers the arrays, which travel by pickle (one copy down, one up), and their random numbers
with dask; workers of hpcgpu do so.
"""

from __future__ import annotations

from hpcgpu.sim.array import SimArray as SimArray
from hpcgpu.sim.array import read_usage_bytes as read_usage_bytes
from hpcgpu.sim.gpu import OutOfMemoryError as OutOfMemoryError
from hpcgpu.sim.gpu import RandomState as RandomState
from hpcgpu.sim.gpu import SimGpu as SimGpu
from hpcgpu.sim.gpu import asarray as asarray
from hpcgpu.sim.gpu import current_gpu as current_gpu
from hpcgpu.sim.gpu import set_current_gpu as set_current_gpu
from hpcgpu.sim.registration import register as register
