"""The store end to end: a real cluster with more data than its worker may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Worker, wait
from waiting import until

import hpcgpu
from hpcgpu import LocalGPUCluster

MIB = 1 << 20
DEVICE, HOST = 64 * MIB, 400 * MIB
TARGET = 0.6  # distributed.yaml, worker.memory.target
EACH, COUNT = 8 * MIB, 75  # 600 MiB: 1.5 times the host's limit, over nine times the device


def expected(i: int) -> float:
    return float(np.random.default_rng(i).random(EACH // 8).sum())


def tiers(client: Client) -> dict[str, int]:
    """Bytes in the tiers of the one worker, when it has come to rest."""

    def settled(dask_worker: Worker) -> dict[str, int]:
        if not dask_worker.data.settle(60):
            raise TimeoutError("the store did not come to rest")
        return dict(dask_worker.data.tiers)

    (found,) = client.run(settled).values()
    return dict(found)


def moves(client: Client) -> dict[str, int]:
    (worker,) = hpcgpu.memory(client).workers
    return {way: moved.nbytes for way, moved in worker.moved.items()}


@pytest.mark.parametrize("jit", [False, True], ids=["whole values", "jit_unspill"])
def test_one_and_a_half_times_the_host_limit_of_device_data(tmp_path: Path, jit: bool) -> None:
    """Device, host and disk are all used, results are right, and each tier settles below its limit."""

    def make(i: int) -> Any:
        from hpcgpu import sim

        block = sim.asarray(np.random.default_rng(i).random(EACH // 8))
        return [block] if jit else block

    def total(block: Any) -> float:
        return float((block[0] if jit else block).sum())

    options = {"device_memory_limit": 0.8, "memory_limit": HOST, "local_directory": str(tmp_path / "scratch")}
    with LocalGPUCluster(gpus="sim:1x64MiB", jit_unspill=jit, **options) as cluster, Client(cluster) as client:
        blocks = client.map(make, range(COUNT), pure=False)
        assert not wait(blocks).not_done
        found = tiers(client)
        assert sum(found.values()) >= COUNT * EACH
        assert min(found.values()) > EACH  # all three are used
        (log,) = (tmp_path / "scratch").rglob("hpcgpu.log")
        assert "spilling begins: device to host " in log.read_text()
        for _ in range(2):  # against the order of making: what is needed first lies highest, then lowest
            sums = client.gather([client.submit(total, b, pure=False) for b in reversed(blocks)])
            assert sums[::-1] == pytest.approx([expected(i) for i in range(COUNT)], rel=1e-9)
        assert min(moves(client).values()) > EACH  # in every direction
        found = tiers(client)
        assert found["device"] <= 0.8 * DEVICE
        assert found["host"] <= TARGET * HOST
        (worker,) = hpcgpu.memory(client).workers
        assert worker.process_bytes < 0.95 * HOST  # else the nanny would have ended it
        before = moves(client)
        del blocks, sums
        until(lambda: not any(client.run(lambda dask_worker: len(dask_worker.data)).values()), "all keys are released")
        assert tiers(client) == {"device": 0, "host": 0, "disk": 0}
        # releasing moves nothing; to disk Dask's memory monitor may send something at any moment
        assert {**moves(client), "host_to_disk": 0} == {**before, "host_to_disk": 0}


def test_views_in_host_memory_beyond_the_limit(tmp_path: Path) -> None:
    """Rows of arrays, as a rechunk makes them: each byte counts once, goes to disk once, and comes back."""

    def make(i: int) -> list[np.ndarray]:
        return list(np.random.default_rng(i).random(EACH // 8).reshape(8, -1))

    def take(rows: list[np.ndarray], j: int) -> np.ndarray:
        return rows[j]

    options = {"memory_limit": HOST, "local_directory": str(tmp_path / "scratch")}
    with LocalGPUCluster(gpus="sim:1x64MiB", **options) as cluster, Client(cluster) as client:
        splits = client.map(make, range(COUNT), pure=False)
        parts = [[client.submit(take, split, j, pure=False) for j in range(8)] for split in splits]
        assert not wait([p for row in parts for p in row]).not_done
        found = tiers(client)
        assert found["host"] <= TARGET * HOST
        assert COUNT * EACH <= sum(found.values()) < 1.05 * COUNT * EACH
        del splits
        sums = client.gather([[client.submit(np.sum, p, pure=False) for p in row] for row in parts])
        assert np.sum(sums, axis=1) == pytest.approx(np.array([expected(i) for i in range(COUNT)]), rel=1e-9)
        assert tiers(client)["host"] <= TARGET * HOST
