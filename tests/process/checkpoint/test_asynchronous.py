"""Checkpoints of asynchronous clients: methods are awaited, the event loop goes on; workers in the same process."""

import asyncio
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from store_clusters import cluster, kinds, make, small_gpu

from hpcgpu import Checkpoint
from hpcgpu.errors import ConfigError
from hpcgpu.sim import SimGpu

RAN: list[int] = []
gpu = small_gpu


def counted(block: Any) -> Any:
    RAN.append(len(block))
    return block


def array(n: int) -> Any:
    return da.arange(n, chunks=10).map_blocks(counted, dtype=int, meta=np.empty(0, int))


async def start(folder: Path) -> list[Any]:
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    async with (
        LocalCluster(**options, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
        Checkpoint(folder) as checkpoint,
    ):
        assert checkpoint.asynchronous
        with pytest.raises(ConfigError, match="with async with"), checkpoint:
            pass
        x, y, nest = await asyncio.gather(
            checkpoint.persist(array(80), name="x"),
            checkpoint.persist(array(40), name="y"),
            checkpoint.persist({"f": client.submit(max, 1, 2)}, name="nest"),
        )
        results = await asyncio.gather(*client.compute([x.sum(), y.sum()]), nest["f"])
        assert await checkpoint.flush()
        progress, z = await asyncio.gather(checkpoint.progress(), checkpoint.load("x"))
        assert [(row.name, row.done, row.count) for row in progress.rows] == [("nest", 1, 1), ("x", 8, 8), ("y", 4, 4)]
        await checkpoint.remove("y")
        assert checkpoint.names == ("nest", "x")
        return [*results, await client.compute(z.sum())]


async def test_methods_of_an_asynchronous_client_are_awaited(tmp_path: Path) -> None:
    assert await start(tmp_path / "run") == [3160, 780, 2, 3160]
    assert len(RAN) == 12
    assert await start(tmp_path / "run") == [3160, 780, 2, 3160]
    assert len(RAN) == 16  # y was removed
    assert not (tmp_path / "run" / "owner").exists()


async def test_loaded_chunks_are_arrays_in_any_task(gpu: SimGpu, tmp_path: Path) -> None:
    """Workers with the store and their client are in one process. Dask fuses a load with the task that needs it."""

    def kind(block: Any) -> Any:
        return np.array(kinds(block))

    async with (
        cluster(tmp_path / "store", plugin=True) as (client, *_),
        Checkpoint(tmp_path / "run", client) as checkpoint,
    ):
        x = da.arange(4, chunks=1).map_blocks(lambda block: make(block[0]), dtype="u1", meta=np.empty(0, "u1"))
        await wait(await checkpoint.persist(x, name="x"))
        assert await checkpoint.flush()
        x = await checkpoint.load("x")
        met = x.map_blocks(kind, dtype="U9", chunks=(1,))
        assert set(await client.compute(met)) == {"SimArray"}
        assert set(met.compute(scheduler="sync")) == {"SimArray"}
        assert set(met.compute(scheduler="threads")) == {"SimArray"}
        before = gpu.used_bytes
        await wait(x := client.persist(x))
        assert gpu.used_bytes == before  # they are on the host until they are needed
        assert kinds(*await client.gather(client.futures_of(x))) == ["SimArray"] * 4
