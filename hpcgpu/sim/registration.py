"""Register simulated arrays, which travel by pickle (one copy down, one up), and their sizes with Dask."""

from __future__ import annotations

import functools

from hpcgpu.sim.array import SimArray
from hpcgpu.sim.array import read_usage_bytes as read_usage_bytes


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
