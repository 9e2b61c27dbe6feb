"""The store end to end: clusters with more data than their workers may hold, with and without jit_unspill."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from distributed import Client, Worker, wait
from waiting import scaled, until

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


def test_one_and_a_half_times_the_host_limit_of_device_data(tmp_path: Path) -> None:
    """Device, host and disk are all used, results are right, and each tier settles below its limit."""

    def make(i: int) -> Any:
        from hpcgpu import sim

        return sim.asarray(np.random.default_rng(i).random(EACH // 8))

    def total(block: Any) -> float:
        return float(block.sum())

    options = {"device_memory_limit": 0.8, "memory_limit": HOST, "local_directory": str(tmp_path / "scratch")}
    with LocalGPUCluster(gpus="sim:1x64MiB", **options) as cluster, Client(cluster) as client:
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


def test_an_all_to_all_of_dicts_of_arrays(tmp_path: Path) -> None:
    """A shuffle: 16 tasks give a dict of 16 device arrays each, 16 others take one of each dict: 128 MiB on 64.

    A data frame in each dict goes with it, through host memory that has room for 15 MB, and to the other worker.
    """
    code = """
    import hpcgpu, numpy as np, pandas as pd
    from hpcgpu import sim
    from hpcgpu.spill.proxies import is_proxy
    N = 16
    def split(i):
        frame = pd.DataFrame({"i": np.full(65_536, float(i)), "j": np.arange(65_536)})
        return {j: sim.asarray(np.full(65_536, float(i * N + j))) for j in range(N)} | {"frame": frame}
    def take(j, *parts):
        found = [p[j] for p in parts]
        return float(sum(x.sum() for x in found).get() if hasattr(found[0], "get") else sum(found).sum())
    with Client() as client:
        splits = [client.submit(split, i, pure=False) for i in range(N)]
        client.gather([client.submit(len, s) for s in splits])
        assert all(client.run(lambda dask_worker: dask_worker.data.settle(60)).values())
        sums = client.gather([client.submit(take, j, *splits) for j in range(N)])
        expected = [sum(float(i * N + j) for i in range(N)) * 65_536 for j in range(N)]
        assert sums == expected
        moved = hpcgpu.memory(client).total.moved
        assert min(way.nbytes for way in moved.values()) > 0
        def seen(parts):
            return type(parts).__name__, is_proxy(parts[3]), isinstance(parts[3], sim.SimArray)
        kinds = client.gather([client.submit(seen, s) for s in splits[:2]])
        assert kinds == [("dict", True, True)] * 2, kinds
        def summed(parts):
            frame = parts["frame"]
            return is_proxy(frame), isinstance(frame, pd.DataFrame), float(frame["i"].sum() + frame.to_numpy()[-1, 1])
        places = list(client.scheduler_info()["workers"])
        found = [client.gather([client.submit(summed, s, workers=[w], pure=False) for s in splits]) for w in places]
        assert found == [[(True, True, i * 65_536.0 + 65_535) for i in range(N)]] * 2
    """
    options = ("--gpus", "sim:2x32MiB", "--memory-limit", "300MB", "--jit-unspill")
    env = {"DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "0.05"}
    done = ranks.run(ranks.script(tmp_path, code), options=options, env=env, timeout=scaled(150))
    assert done.returncode == 0, done.stdout + done.stderr
