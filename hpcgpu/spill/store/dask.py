"""Registers the store's types with dask."""

from __future__ import annotations

import functools

from dask.sizeof import sizeof

from hpcgpu.spill.store import cupy_messages
from hpcgpu.spill.store.transfer import Handle, Packed


@functools.cache
def register() -> None:
    """Register handles with dask, in this process: without it each would count 64 bytes."""
    sizeof.register(Handle, lambda handle: handle.nbytes)
    sizeof.register(Packed, lambda packed: packed.nbytes)
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    cupy_messages.register(dask_serialize, dask_deserialize)
