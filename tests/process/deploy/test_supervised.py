"""Parts of a cluster that fail, are stopped, or end: the words for it, and whether it goes on or all is gone."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
from distributed import Client, Scheduler
from waiting import Said, scaled, until

from hpcgpu import JobError, LocalGPUCluster
from hpcgpu.deploy.processes.heartbeats import StreamHeartbeats, answer_by_stream
from hpcgpu.deploy.processes.worker import SilentWorker

STALLED = "all workers have paused for 60 s"
CLIENT = """
import sys
from hpcgpu import LocalGPUCluster
if __name__ == "__main__":
    with LocalGPUCluster(gpus="sim:1", client_grace=2) as cluster:
        print(cluster.job_id, flush=True)
        sys.stdin.read()
"""
# Twice the grace until rank 0 is given up, as long until the worker is, and a loaded machine.
GONE_S = 45


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


@pytest.mark.parametrize(
    ("who", "end"), [("fork_server", "closes"), ("leader", "closes"), ("leader", "is killed"), ("client", "is killed")]
)
def test_a_stopped_process_is_gone_when_its_client_ends(tmp_path: Path, who: str, end: str) -> None:
    """A client that is stopped has ended after its grace, but for rank 0, a zombie until the client is killed."""
    (tmp_path / "client.py").write_text(CLIENT)
    argv = [sys.executable, str(tmp_path / "client.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        leader = psutil.Process(int(client.stdout.readline()))
        (fork_server,) = leader.children()
        family = [leader, fork_server, *fork_server.children()]
        os.kill({"leader": leader, "fork_server": fork_server, "client": client}[who].pid, signal.SIGSTOP)
        if who == "client":
            assert psutil.wait_procs(family[1:], timeout=GONE_S)[1] == []
        client.stdin.close() if end == "closes" else client.kill()
        assert psutil.wait_procs(family, timeout=GONE_S)[1] == []
        assert client.wait(GONE_S) == (0 if end == "closes" else -signal.SIGKILL)


class _Slow(Scheduler):
    """Answers no sign of life after the worker has registered until it is told to."""

    def hold(self) -> None:
        self.heard, self.answering = asyncio.Event(), asyncio.Event()
        answer = self.handlers["heartbeat_worker"]

        async def heartbeat_worker(*args: object, **kwargs: object) -> object:
            self.heard.set()
            await self.answering.wait()
            return answer(*args, **kwargs)

        self.handlers["heartbeat_worker"] = heartbeat_worker
        answer_by_stream(self)
        answer_there = self.stream_handlers["hpcgpu_heartbeat"]

        async def by_stream(**facts: object) -> None:
            self.heard.set()
            await self.answering.wait()
            await answer_there(**facts)

        self.stream_handlers["hpcgpu_heartbeat"] = by_stream


@pytest.mark.parametrize("by_stream", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_a_sign_of_life_under_way_ends_with_the_worker(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, *, missing: bool, by_stream: bool
) -> None:
    async def run() -> None:
        async with _Slow(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
            scheduler.hold()
            options = {"host": "127.0.0.1", "local_directory": str(tmp_path), "heartbeat_interval": "20ms"}
            worker = SilentWorker(scheduler.address, **options)
            if by_stream:
                StreamHeartbeats(worker)
            await worker
            await asyncio.wait_for(scheduler.heard.wait(), scaled(30))
            if missing:  # the answer is that the scheduler does not know the worker, or that its stream ends: it closes
                await scheduler.remove_worker(worker.address, stimulus_id="test", close=False)
                scheduler.answering.set()
                await asyncio.wait_for(worker.finished(), scaled(30))
            else:
                await asyncio.wait_for(worker.close(nanny=False), scaled(30))
            scheduler.answering.set()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    names = ("distributed.worker", "tornado.application", "asyncio")
    messages = [r.getMessage() for r in caplog.records if r.name in names]
    unaware = ["Scheduler was unaware of this worker; shutting down."]
    assert messages == (unaware if missing and not by_stream else [])
