"""A cluster whose parts in the background meet what nobody expected: what people are told, and that it goes on."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import local_system
import pytest
import ranks
from distributed import Client
from waiting import Said, scaled, until

from hpcgpu import JobError, LocalGPUCluster
from hpcgpu.deploy.cluster.batch import BatchGPUCluster


class LocalJobs(BatchGPUCluster):
    """The machine as a batch system."""

    batch = "local"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    ranks.use_environment(monkeypatch)
    local_system.use(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folder(home: Path) -> Path:
    (found,) = (home / ".hpcgpu" / "runs").iterdir()
    return found


def test_wait_for_workers_says_why_nobody_looks_after_the_jobs(home: Path, said: Said) -> None:
    options = {"gpus": "sim:1x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
    with LocalJobs(**options, log_directory=str(home)) as cluster:
        cluster.scale(jobs=1)
        cluster.wait_for_workers(1)
        (job,) = (row.id for row in cluster.jobs.rows if row.has == "workers")
        written = folder(home) / "record"
        written.unlink()
        written.mkdir()  # as a home that is full, or a file server that has lost the handle
        os.killpg(int(job.partition(".")[0]), signal.SIGKILL)
        until(lambda: not cluster.scheduler_info["workers"], "no worker is known")
        with pytest.raises(JobError, match=r"the loop that looks after this cluster's jobs has failed .* IsADirectory"):
            cluster.wait_for_workers(1, timeout=scaled(60))
        written.rmdir()
        until(lambda: cluster.scheduler_info["workers"], "a worker is known")
        cluster.wait_for_workers(1)
        assert job in written.read_text()  # as gone


STALLED = "all workers have paused for 60 s"


def telling(news: list[Any]) -> Any:
    """What has a scheduler tell its cluster objects something, or nothing any more; made here, it travels by value."""

    def tell(dask_scheduler: Any) -> None:
        from distributed.scheduler import WorkerStatusPlugin

        for plugin in list(dask_scheduler.plugins.values()):
            if isinstance(plugin, WorkerStatusPlugin):
                if news:
                    plugin.bcomm.send(news)
                else:
                    plugin.bcomm.comm.abort()

    return tell


def test_a_cluster_in_which_nothing_goes_on_says_so(home: Path, said: Said) -> None:
    with LocalGPUCluster(gpus="sim:1x16MiB") as cluster, Client(cluster) as client:
        client.run_on_scheduler(telling(["stalled", STALLED]))
        stalled = f"LocalGPUCluster(hpcgpu, stalled: {STALLED})"
        until(lambda: repr(cluster) == stalled, "the cluster says that nothing goes on")
        assert STALLED in said.text
        client.run_on_scheduler(telling(["stalled", ""]))
        until(lambda: "workers=1" in repr(cluster), "and that something does")


def test_news_of_workers_that_are_not_understood_are_asked_for_anew(home: Path, said: Said) -> None:
    with LocalGPUCluster(gpus="sim:1x16MiB") as cluster, Client(cluster) as client:
        client.run_on_scheduler(telling(["add", None]))
        until(lambda: "the cluster is back" in said.text, "the return is said")
        (before,) = cluster.scheduler_info["workers"]
        client.restart()
        until(lambda: list(cluster.scheduler_info["workers"]) not in ([], [before]), "another worker is known")


def test_a_search_for_the_scheduler_that_raises_goes_on(home: Path, said: Said) -> None:
    with LocalGPUCluster(gpus="sim:1x16MiB") as cluster, Client(cluster) as client:
        (published,) = Path(tempfile.gettempdir()).rglob("scheduler")
        good = published.read_text()
        published.write_text(json.dumps({**json.loads(good), "addresses": ["carrier-pigeon://loft:1"]}))
        client.run_on_scheduler(telling([]))
        with pytest.raises(JobError, match=r"the search for this cluster's scheduler has failed .* ValueError"):
            cluster.sync(cluster._wait_for_workers, 2, timeout=scaled(60))  # the public one refuses it
        published.write_text(good)
        until(lambda: "the cluster is back" in said.text, "the return is said")
        cluster.wait_for_workers(1)


def test_a_rank_0_that_cannot_follow_the_scheduler_ends_the_run(tmp_path: Path) -> None:
    code = """
        def garble(dask_scheduler):
            dask_scheduler.plugins["hpcgpu-report"].control.send("workers")  # how many is missing

        Client().run_on_scheduler(garble)
        time.sleep(600)
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:1"))
    assert done.returncode == 70
    assert "the run ends: the scheduler process cannot be followed: KeyError: 'count'" in done.stderr
    assert "Traceback" in done.stderr
