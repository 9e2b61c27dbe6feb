"""A run without a worker that can work, and with none to come, ends, or its tasks do; each with the reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ranks
from distributed import Client
from waiting import scaled, until

from hpcgpu import JobError, LocalGPUCluster

# Ends the nanny of each worker, as distributed does with one that it cannot start again.
DIES = """
    def die(dask_worker):
        import asyncio
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(dask_worker.close(reason="broken")))

    with Client() as client:
        client.run(die, nanny=True)
        client.submit(sum, [1], key="late").result()
        time.sleep(600)
"""
LEAVE = """
    with Client() as client:
        client.retire_workers(list(client.scheduler_info()["workers"]))
        print("without workers")
        client.submit(sum, [1]).result()
"""
# It waits for none of its futures, so that it does not end by their errors.
FILL = """
    with Client() as c:
        blocks = c.map(lambda i: os.urandom(30_000_000), range(40), pure=False)
        time.sleep(600)
"""


def test_workers_that_died_for_good_end_the_run(tmp_path: Path) -> None:
    done = ranks.run(ranks.script(tmp_path, DIES), options=("--gpus", "sim:1"))
    assert done.returncode == 1
    assert "the run ends: no worker is left, and none comes: worker " in done.stderr
    assert ": broken\n" in done.stderr


def test_a_script_that_lets_its_workers_go_goes_on_but_no_task_of_it_waits_for_ever(tmp_path: Path) -> None:
    options = ("--gpus", "sim:1", "--death-timeout", "4")
    done = ranks.run(ranks.script(tmp_path, LEAVE), options=options)
    assert (done.returncode, done.stdout) == (1, "without workers\n")
    assert "all workers have been retired; the script goes on without workers" in done.stderr
    assert "the run ends: no worker is left, and none comes" in done.stderr


def test_a_cluster_without_workers_is_lost_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.use_environment(monkeypatch)
    with LocalGPUCluster(gpus="sim:1", log_directory=str(tmp_path)) as cluster, Client(cluster) as client:
        client.retire_workers(list(client.scheduler_info()["workers"]))
        until(lambda: "is lost" in repr(cluster) or "lost" in repr(cluster), "the end is known")
        with pytest.raises(JobError, match=r"the job ends: all its workers have been retired"):
            cluster.wait_for_workers(1)


def test_all_workers_pause_and_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no mounts for users here (unshare --mount --map-root-user)")
    (tmp_path / "small").mkdir()
    prepare = f'mount -t tmpfs -o size=40M none {tmp_path}/small && exec "$@"'
    options = ["--gpus", "sim:1", "--memory-limit", "450MB", "--death-timeout", "12"]
    options += ["--local-directory", f"{tmp_path}/small"]
    argv = [*inside, "bash", "-c", prepare, "job", *ranks.command(ranks.script(tmp_path, FILL), options=options)]
    done = ranks.run_command(argv, timeout=scaled(120))
    assert done.returncode == 1, done.stderr
    assert "all workers have paused for 12 s, because their memory is full" in done.stderr
    assert "No space left on device" in done.stderr
    assert "hpcgpu: the run ends: all workers have paused\n" in done.stderr
