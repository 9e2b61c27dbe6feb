"""Simulated GPUs: to try hpcgpu, to plan for a machine, to teach, and to test without a GPU.

``hpcgpu.sim.register()`` registers the arrays, which travel by pickle (one copy down, one up), and their random numbers
with dask; workers of hpcgpu do so.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hpcgpu.sim.array import SimArray
from hpcgpu.sim.array import read_usage_bytes as read_usage_bytes
from hpcgpu.sim.gpu import OutOfMemoryError as OutOfMemoryError
from hpcgpu.sim.gpu import SimGpu as SimGpu
from hpcgpu.sim.gpu import asarray as asarray
from hpcgpu.sim.gpu import current_gpu
from hpcgpu.sim.gpu import set_current_gpu as set_current_gpu


def register() -> None:
    """Register simulated arrays with dask, in this process."""
    register_sizes()
    register_with_arrays()


@functools.cache
def register_sizes() -> None:
    """Register the sizes of simulated arrays with Dask, without dask.array, whose import takes 0.2 CPU s."""
    from dask.sizeof import sizeof

    sizeof.register(SimArray, lambda array: int(array.nbytes))


@functools.cache
def register_with_arrays() -> None:
    """Register simulated arrays with dask.array, which this imports."""
    from dask.array import register_chunk_type
    from dask.array.backends import _nannumel, _numel_arraylike  # as dask registers them for CuPy (dask 2026.8.0)
    from dask.array.dispatch import nannumel_lookup, numel_lookup, to_numpy_dispatch

    register_chunk_type(SimArray)
    numel_lookup.register(SimArray, _numel_arraylike)
    nannumel_lookup.register(SimArray, _nannumel)
    to_numpy_dispatch.register(SimArray, lambda array, **_: array.get())


class RandomState:
    """Random numbers made on the device, for ``da.random.RandomState(seed, RandomState=hpcgpu.sim.RandomState)``."""

    def __init__(self, seed: Any = None) -> None:  # as numpy's
        self._numpy = np.random.RandomState(seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        draw = getattr(self._numpy, name)

        def on_device(*args: Any, **kwargs: Any) -> Any:
            drawn = draw(*args, **kwargs)
            return current_gpu().adopt(drawn) if isinstance(drawn, np.ndarray) else drawn

        return on_device
