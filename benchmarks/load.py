"""A thousand workers join a scheduler and leave it: CPU milliseconds for each, here and in the scheduler.

The workers are one process that says what workers say when they register (``tests/support/crowd.py``), over TLS; of 250
jobs of a Slurm that answers at once. Beside us: distributed's LocalCluster, whose scheduler and cluster object are one
process. One JSON line per figure; the median of ``--runs`` runs, both in turn in each run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _figures
from distributed import LocalCluster
from distributed.security import Security

from hpcgpu import SLURMGPUCluster

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from crowd import JOB, Crowd, tree_cpu_s, write_slurm

JOBS, PER_JOB = 250, 4
NAMES = [f"{JOB}_{job}-{worker}" for job in range(JOBS) for worker in range(PER_JOB)]
CASE = f"{len(NAMES)} workers of {JOBS} jobs join and leave"
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def come_and_go(cluster: Any) -> None:
    """Have all of them register and leave, and wait until the cluster object knows it."""
    there = cluster.scheduler_info["workers"]
    with Crowd(cluster) as crowd:
        crowd.join(NAMES)
        while len(there) < len(NAMES):
            time.sleep(0.05)
        crowd.leave()
        while there:
            time.sleep(0.05)


def own_cpu_s() -> float:
    return time.process_time()


def ours() -> dict[str, float]:
    """Return the CPU seconds of the cluster object's process, of scale(), and of the scheduler with its rank."""
    options = {"gpus": f"sim:{PER_JOB}", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
    with tempfile.TemporaryDirectory() as folder:
        write_slurm(Path(folder), JOBS)
        os.environ.update(ROOT, HOME=folder, PATH=f"{folder}:{os.environ['PATH']}")
        with SLURMGPUCluster(**options, log_directory=folder, quiet=True) as cluster:
            scale_s = cost(own_cpu_s, lambda: cluster.scale(jobs=JOBS))
            scheduler = tree_cpu_s(cluster.job_id)
            object_s = cost(own_cpu_s, lambda: come_and_go(cluster))
            scheduler = tree_cpu_s(cluster.job_id) - scheduler
        os.environ["PATH"] = os.environ["PATH"].removeprefix(f"{folder}:")
    return {"hpcgpu, cluster object": object_s, "hpcgpu, scheduler": scheduler, "scale": scale_s}


def theirs() -> dict[str, float]:
    secured = {"security": Security.temporary(), "protocol": "tls", "dashboard_address": None}
    with LocalCluster(n_workers=0, silence_logs="error", **secured) as cluster:
        return {"distributed, scheduler and cluster object": cost(own_cpu_s, lambda: come_and_go(cluster))}


def cost(clock: Callable[[], float], what: Callable[[], object]) -> float:
    start = clock()
    what()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    values: dict[str, list[float]] = {}
    for _ in range(runs):
        for who, seconds in (ours() | theirs()).items():
            values.setdefault(who, []).append(seconds * 1e3)
    scale = values.pop("scale")
    for who, milliseconds in values.items():
        each = [value / len(NAMES) for value in milliseconds]
        _figures.report("load", CASE, who, "cpu_ms_per_join_and_leave", each, "ms")
    _figures.report("load", f"scale(jobs={JOBS})", "hpcgpu", "own_cpu_ms", scale, "ms")


if __name__ == "__main__":
    main()
