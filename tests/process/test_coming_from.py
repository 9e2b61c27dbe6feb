"""The pages of docs/coming-from: what they show runs, and their tables name what there is."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from distributed import Client, LocalCluster
from pages import after, blocks
from waiting import scaled, until

import hpcgpu


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
    pipes = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(argv, cwd=folder, env=env, timeout=scaled(150), **pipes)


@pytest.mark.parametrize(("diff", "line"), [(0, 0), (1, 2)], ids=["its ranks", "our ranks"])
def test_dask_mpi(tmp_path: Path, diff: int, line: int) -> None:
    text = after(blocks("dask-mpi", "diff")[diff])
    (tmp_path / "script.py").write_text(text)
    done = run(shlex.split(blocks("dask-mpi", "bash")[line]), tmp_path)
    assert done.stdout == "6\n", done.stderr


def test_dask_mpis_command(tmp_path: Path) -> None:
    argv, file = shlex.split(blocks("dask-mpi", "bash")[1]), tmp_path / "scheduler.json"
    env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: process.poll() is not None or file.exists(), "the scheduler's file")
            assert process.poll() is None
            with Client(scheduler_file=str(file), timeout=scaled(60)) as client:
                client.wait_for_workers(2, timeout=scaled(90))
                assert not hpcgpu.bindings(client).differences
        finally:
            process.terminate()
            process.wait(scaled(30))


def test_local_cuda_cluster(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(after(blocks("dask-cuda", "diff")[0]))
    done = run([sys.executable, "script.py"], tmp_path)
    assert done.stdout == "6\n", done.stderr


def test_a_scheduler_file_of_dasks_own_scheduler(tmp_path: Path) -> None:
    line = after(blocks("sbatch", "diff")[1]).removeprefix("srun ").rstrip(" &\n")
    file = tmp_path / "scheduler.json"
    argv = [str(file) if word == "$SCHEDULER_FILE" else word for word in shlex.split(line)]
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, Client(cluster) as client:
        client.write_scheduler_file(str(file))
        env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
        with subprocess.Popen([*argv, "--gpus", "sim:1"], env=env, stderr=subprocess.DEVNULL) as process:
            client.wait_for_workers(1, timeout=scaled(60))
            assert len(hpcgpu.bindings(client).workers) == 1
            process.terminate()


def test_dask_cuda_worker(tmp_path: Path) -> None:
    argv = shlex.split(after(blocks("dask-cuda", "diff")[1]))
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, Client(cluster) as client:
        argv = [cluster.scheduler_address if word.startswith("tcp://") else word for word in argv]
        env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
        with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as process:
            client.wait_for_workers(2, timeout=scaled(60))
            assert len(hpcgpu.bindings(client).workers) == 2
            process.terminate()
