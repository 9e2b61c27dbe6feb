"""A killed mpirun leaves a folder named by its pid; a later one that gets the pid starts all the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import ranks
from waiting import scaled

from hpcgpu import LocalGPUCluster


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of one that was killed; all temporary files are beside it."""
    ranks.use_environment(monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with subprocess.Popen([*ranks.MPIRUN, "-n", "1", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdin
        assert killed.stdout
        killed.stdin.write(b"up\n")
        killed.stdin.flush()
        assert killed.stdout.readline() == b"up\n"
        killed.send_signal(signal.SIGKILL)
    return tmp_path / f"ompi.{killed.pid}"


def test_a_launch_has_the_pid(left: Path) -> None:
    path = ranks.script(left.parent, "print(Client().submit(sum, [1, 2]).result())")
    argv = [str(ranks.BIN / "hpcgpu"), "launch", "--launcher", "mpirun", "--gpus", "sim:1", str(path)]
    first = ["sh", "-c", f'mv {left} {left.parent}/ompi.$$ && exec "$@"', "sh", *argv]
    done = subprocess.run(first, capture_output=True, text=True, timeout=scaled(90), stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_the_ranks_of_a_cluster_object_have_the_pid(left: Path) -> None:
    last = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
    later = [left.with_name(f"ompi.{pid}") for pid in range(last + 1, last + 400)]
    for folder in later:
        shutil.copytree(left, folder)
    with LocalGPUCluster(gpus="sim:1", launcher="mpirun") as cluster:
        assert left.with_name(f"ompi.{cluster.job_id}") in later
        os.kill(int(cluster.job_id), 0)
    assert all(folder.exists() for folder in later)  # whosever they are
