"""A cluster whose parts in the background meet what nobody expected: what people are told, and that it goes on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
from distributed import Client
from waiting import Said, scaled, until

from hpcgpu import JobError, LocalGPUCluster

STALLED = "all workers have paused for 60 s"


def telling(news: list[Any]) -> Any:
    """Return a function by which a scheduler tells its cluster objects this, or ends their connection."""

    def tell(dask_scheduler: Any) -> None:
        from distributed.scheduler import WorkerStatusPlugin

        for plugin in list(dask_scheduler.plugins.values()):
            if isinstance(plugin, WorkerStatusPlugin):
                if news:
                    plugin.bcomm.send(news)
                else:
                    plugin.bcomm.comm.abort()

    return tell


def test_a_cluster_follows_its_scheduler_whatever_that_says(said: Said) -> None:
    """A stall, news that are not understood, and a search for the scheduler that raises."""
    with LocalGPUCluster(gpus="sim:1x16MiB") as cluster, Client(cluster) as client:
        client.run_on_scheduler(telling(["stalled", STALLED]))
        stalled = f"LocalGPUCluster(hpcgpu, stalled: {STALLED})"
        until(lambda: repr(cluster) == stalled, "the cluster says that nothing goes on")
        assert STALLED in said.text
        client.run_on_scheduler(telling(["stalled", ""]))
        until(lambda: "workers=1" in repr(cluster), "and that something does")
        client.run_on_scheduler(telling(["add", None]))
        until(lambda: "the cluster is back" in said.text, "the return is said")
        (before,) = cluster.scheduler_info["workers"]
        client.restart()
        until(lambda: list(cluster.scheduler_info["workers"]) not in ([], [before]), "another worker is known")
        (published,) = Path(tempfile.gettempdir()).rglob("scheduler")
        good = published.read_text()
        published.write_text(json.dumps({**json.loads(good), "addresses": ["carrier-pigeon://loft:1"]}))
        client.run_on_scheduler(telling([]))
        with pytest.raises(JobError, match=r"the search for this cluster's scheduler has failed .* ValueError"):
            cluster.sync(cluster._wait_for_workers, 2, timeout=scaled(60))  # the public one refuses it
        published.write_text(good)
        until(lambda: said.text.count("the cluster is back") == 2, "the second return is said")
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
