"""What dask must know of the store."""

from __future__ import annotations

import functools

from dask.sizeof import sizeof

from hpcgpu.spill.store import cupy_messages
from hpcgpu.spill.store.handle import Handle, Packed


@functools.cache
def register() -> None:
    """Make handles known to dask, in this process: by type, they would count 64 bytes."""
    sizeof.register(Handle, lambda handle: handle.nbytes)
    sizeof.register(Packed, lambda packed: packed.nbytes)
    from distributed.protocol.serialize import dask_deserialize, dask_serialize

    cupy_messages.register(dask_serialize, dask_deserialize)
