"""What a run has used: said at its end, and asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import ranks
from distributed import Client

from hpcgpu import LocalGPUCluster, sim

MIB = 1 << 20


def test_a_script_ends_with_its_progress_and_summary(tmp_path: Path) -> None:
    """The last line of progress is complete, however short the script was; results of the script go elsewhere."""
    code = """
        from distributed import wait
        c = Client()
        c.submit(time.sleep, 0.3).result()
        wait(c.map(lambda i: 100 // (i - 7), range(30), pure=False))
        print("done")
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:2", "--progress"))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    progress, summary = (re.findall(rf"^hpcgpu: {kind}: (.*)$", done.stderr, re.M) for kind in ("tasks", "summary"))
    assert progress[-1] == "30 of 31 done, 1 failed"
    assert re.search(r" with 2 GPUs, 0\.\d\d GPU hours, a task ran in ", summary[0])  # on a slow machine 12 s: 0.01
    assert summary[2] == "nothing was spilled"
    assert "JSON" not in done.stderr  # which the log of a batch job has


def test_a_cluster_is_asked_while_it_runs_and_after_its_end() -> None:
    with LocalGPUCluster(gpus="sim:2x64MiB", quiet=True) as cluster, Client(cluster) as client:
        held = client.map(lambda i: sim.asarray(np.full(8 << 20, i, "u1")), range(16))
        client.gather(client.map(lambda x: int(x[0]), held))
        assert all(client.run(lambda dask_worker: dask_worker.data.settle(60)).values())
        first = cluster.summary().usage  # the workers' figures of now, though their heartbeats are half a second apart
        assert (first.gpus, first.workers, first.restarts) == (2, 2, 0)
        assert first.moved_bytes["device_to_host"] >= 16 * MIB
        assert 0 < first.busy_share <= 1
        assert first.peak_bytes["device"] >= 40 * MIB
        client.restart_workers([next(iter(client.scheduler_info()["workers"]))])
        client.wait_for_workers(2)
    last = cluster.summary()
    assert last.usage.restarts == 1
    assert last.usage.moved_bytes["device_to_host"] >= first.moved_bytes["device_to_host"]
    assert json.loads(last.as_json())["gpus"] == 2
