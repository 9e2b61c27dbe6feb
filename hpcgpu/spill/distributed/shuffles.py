"""distributed's P2P shuffles with the store: the private names of distributed 2026.8.0 that spill uses."""

from __future__ import annotations

import functools
from pickle import PickleBuffer
from typing import Any

from dask.core import flatten
from distributed.shuffle import _core as shuffle


@functools.cache
def adapt_shuffles() -> None:
    """Let P2P rechunking work for arrays of a device, CuPy's too, and the shards of frames go without two copies."""
    measure, send = shuffle._mean_shard_size, shuffle.ShuffleRun._send

    def measure_any(shards: Any) -> int:
        try:
            return measure(shards)
        except TypeError:
            sizes = [x.nbytes for x in flatten(shards, container=(tuple, list)) if hasattr(x, "nbytes")]
            return sum(sizes) // len(sizes) if sizes else 0

    async def send_frames(run: Any, address: str, shards: Any) -> Any:
        if isinstance(shards, list):  # of large ones, which pickle would copy into a message and out of it
            shards = [(i, PickleBuffer(shard) if type(shard) is bytes else shard) for i, shard in shards]
        return await send(run, address, shards)

    shuffle._mean_shard_size = measure_any  # there is no memoryview of a device's array
    shuffle.ShuffleRun._send = send_frames
