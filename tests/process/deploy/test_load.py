"""A thousand workers join and leave: what that costs the cluster object, and what it knows of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from crowd import JOB, Crowd, tree_cpu_s, write_slurm
from waiting import until

from hpcgpu import SLURMGPUCluster
from hpcgpu.deploy.jobs import job_loop
from hpcgpu.supervise.tasks import GATHER_S

JOBS, PER_JOB = 250, 4
NAMES = [f"{JOB}_{job}-{worker}" for job in range(JOBS) for worker in range(PER_JOB)]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_slurm(tmp_path, JOBS)
    ranks.use_environment(monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list((tmp_path / ".hpcgpu" / "runs").iterdir()), "a run has left its folder behind"


def states(cluster: Any) -> set[str]:
    return {row.text for row in cluster.jobs.rows if row.has == "workers"}


def test_a_thousand_workers_join_and_leave_and_the_cluster_hardly_notices(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    reconcile = job_loop.reconcile

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return reconcile(*given)

    monkeypatch.setattr(job_loop, "reconcile", counted)
    options = {"gpus": f"sim:{PER_JOB}", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
    with SLURMGPUCluster(**options, log_directory=str(slurm), quiet=True) as cluster:
        cluster.scale(jobs=JOBS)
        with Crowd(cluster) as crowd:
            start, own_s, others_s = time.monotonic(), time.process_time(), tree_cpu_s(cluster.job_id)
            crowd.join(NAMES)
            cluster.wait_for_workers(len(NAMES))
            until(lambda: states(cluster) == {f"UP {PER_JOB}/{PER_JOB}"}, "all jobs are up", every_s=0.1)
            crowd.leave()
            lost = f"STARTING 0/{PER_JOB} (lost its workers)"
            until(lambda: states(cluster) == {lost}, "all jobs have lost their workers", every_s=0.1)
            own_s, others_s = time.process_time() - own_s, tree_cpu_s(cluster.job_id) - others_s
            took_s = time.monotonic() - start
        own_ms, others_ms = own_s / len(NAMES) * 1e3, others_s / len(NAMES) * 1e3
        print(f"CPU per worker: {own_ms:.3f} ms here, {others_ms:.3f} in the scheduler; {looks} looks at all jobs")
        assert (slurm / "submitted").read_text() == "x\n", "one sbatch for 250 jobs, and none when all workers left"
        assert looks <= 2 * took_s / GATHER_S + 10, "each burst of workers is one look, not each worker"
        assert own_s < others_s
