"""JIT-unspill in a real cluster: working sets over the limits, right answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
from waiting import scaled

OPTIONS = ("--gpus", "sim:2x32MiB", "--memory-limit", "300MB", "--jit-unspill")
HEAD = """
    import dask, dask.array as da, numpy as np
    import hpcgpu
    from hpcgpu import sim
    from hpcgpu.deploy import report
    from hpcgpu.sim.dask import register
    from hpcgpu.spill.proxies.proxy import is_proxy, unproxy
    register()
    def settle(client):
        if not all(client.run(lambda dask_worker: dask_worker.data.settle(60)).values()):
            raise TimeoutError("the stores did not come to rest")
"""


def run(folder: Path, code: str, options: tuple[str, ...] = OPTIONS, **env: str) -> str:
    done = ranks.run(ranks.script(folder, HEAD + code), options=options, env=env, timeout=scaled(150))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_all_to_all_of_dicts_of_arrays(tmp_path: Path) -> None:
    """A shuffle: 16 tasks give a dict of 16 device arrays each, 16 others take one of each dict: 128 MiB on 64.

    A data frame in each dict goes with it, through host memory that has room for 15 MB, and to the other worker.
    """
    out = run(
        tmp_path,
        """
    import pandas as pd
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
        settle(client)
        sums = client.gather([client.submit(take, j, *splits) for j in range(N)])
        expected = [sum(float(i * N + j) for i in range(N)) * 65_536 for j in range(N)]
        print("RIGHT", sums == expected)
        moved = report.spilled(report.workers(client))
        print("DOWN", moved["device_to_host"] > 0, "UP", 0 < moved["host_to_device"])
        print("DISK", moved["host_to_disk"] > 0, moved["disk_to_host"] > 0)
        def seen(parts):
            return type(parts).__name__, is_proxy(parts[3]), isinstance(parts[3], sim.SimArray)
        kinds = client.gather([client.submit(seen, s) for s in splits[:2]])
        print("SEEN", kinds)
        def summed(parts):
            frame = parts["frame"]
            return is_proxy(frame), isinstance(frame, pd.DataFrame), float(frame["i"].sum() + frame.to_numpy()[-1, 1])
        places = list(client.scheduler_info()["workers"])
        found = [client.gather([client.submit(summed, s, workers=[w], pure=False) for s in splits]) for w in places]
        print("FRAMES", found == [[(True, True, i * 65_536.0 + 65_535) for i in range(N)]] * 2)
    """,
        DASK_DISTRIBUTED__WORKER__MEMORY__TARGET="0.05",
    )
    assert "RIGHT True" in out
    assert "DOWN True UP True" in out
    assert "DISK True True" in out
    assert "FRAMES True" in out
    assert "SEEN [('dict', True, True), ('dict', True, True)]" in out


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "whole-keys"])
def test_svds_of_more_than_the_limits(tmp_path: Path, jit: bool) -> None:
    """Three times the device limit and more than the host limit's target."""
    out = run(
        tmp_path,
        """
    with Client() as client:
        x = da.random.default_rng(1).random((200_000, 100), chunks=(5_000, 100)).map_blocks(sim.asarray).persist()
        s = da.linalg.svd(x)[1].compute()
        gram = (x.T @ x).compute()
        s, gram = (v.get() if hasattr(v, "get") else np.asarray(v) for v in (s, gram))
        want = np.sqrt(np.linalg.eigvalsh(gram)[::-1])
        print("TALL", bool(np.allclose(s, want, rtol=1e-8)))
        rng = np.random.default_rng(0)
        u, _ = np.linalg.qr(rng.random((1_000, 5)))
        v, _ = np.linalg.qr(rng.random((1_000, 5)))
        y = da.from_array(u @ np.diag([50.0, 40, 30, 20, 10]) @ v.T, chunks=(250, 250)).map_blocks(sim.asarray)
        seed = da.random.RandomState(1, RandomState=sim.RandomState)
        t = da.linalg.svd_compressed(y, k=5, n_power_iter=2, seed=seed)[1].compute().get()
        print("LOW", bool(np.allclose(t, [50, 40, 30, 20, 10], rtol=1e-6)))
        settle(client)
        moved = report.spilled(report.workers(client))
        most = max(w.tiers["device"] for w in report.workers(client))
        print("TIERS", moved["device_to_host"] > 0, most <= 32 * 2**20)
    """,
        OPTIONS if jit else OPTIONS[:-1],
    )
    assert "TALL True" in out
    assert "LOW True" in out
    assert "TIERS True True" in out
