"""The pages of docs/coming-from: what they show runs, and their tables name what there is."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import ranks
from distributed import Client, LocalCluster
from pages import after, blocks
from waiting import scaled, until

import hpcgpu

PATH = {"PATH": f"{ranks.BIN}:/usr/bin:/bin"}


@pytest.mark.parametrize(("diff", "line"), [(0, 0), (1, 2)], ids=["its ranks", "our ranks"])
def test_dask_mpi(tmp_path: Path, diff: int, line: int) -> None:
    (tmp_path / "script.py").write_text(after(blocks("dask-mpi", "diff")[diff]))
    done = ranks.run_command(["env", f"--chdir={tmp_path}", *shlex.split(blocks("dask-mpi", "bash")[line])], PATH)
    assert done.stdout == "6\n", done.stderr


def test_dask_mpis_command(tmp_path: Path) -> None:
    argv, file = shlex.split(blocks("dask-mpi", "bash")[1]), tmp_path / "scheduler.json"
    with subprocess.Popen(argv, cwd=tmp_path, env=ranks.environment(**PATH), stderr=subprocess.DEVNULL) as process:
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
    done = ranks.run_command([sys.executable, str(tmp_path / "script.py")], PATH)
    assert done.stdout == "6\n", done.stderr


def test_worker_commands_join_dasks_own_scheduler(tmp_path: Path) -> None:
    """By its file, as in the job script of the page for sbatch, and by its address."""
    file = tmp_path / "scheduler.json"
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, Client(cluster) as client, ExitStack() as stack:
        client.write_scheduler_file(str(file))
        by_file = after(blocks("sbatch", "diff")[1]).removeprefix("srun ").rstrip(" &\n")
        by_file = by_file.replace("$SCHEDULER_FILE", str(file))
        by_address = re.sub(r"tcp://\S+", cluster.scheduler_address, after(blocks("dask-cuda", "diff")[1]))
        for line, count in ((f"{by_file} --gpus sim:1", 1), (by_address, 3)):
            process = subprocess.Popen(shlex.split(line), env=ranks.environment(**PATH), stderr=subprocess.DEVNULL)
            stack.enter_context(process)
            stack.callback(process.terminate)
            client.wait_for_workers(count, timeout=scaled(60))
            assert len(hpcgpu.bindings(client).workers) == count
