"""The command line as people type it: one clear message, an exit code, no traceback unless asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

HPCGPU = str(ranks.BIN / "hpcgpu")


def hpcgpu(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCGPU, *words], capture_output=True, text=True, timeout=60, env=ranks.environment(**env), cwd=cwd
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    return str(ranks.script(tmp_path, "print('never')"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "sim:1"], "Did you mean '--gpus'"),
        (["--device-memory-limit", "1.5"], "set by option --device-memory-limit"),
        (["--device-memory-limit", "-1"], "allowed: a fraction of the memory"),
        (["--device-memory-limit", "5 Gigs"], "'5GB'"),
        (["--walltime", "2h30"], "'HH:MM:SS'"),
        (["--nodes", "0"], "a whole number from 1"),
        (["--gpus", "sim:2", "--gpus-per-node", "4"], "leave gpus_per_node out"),
        (["--site", "nowhere"], "no site 'nowhere'; there are: "),
        (["--launcher", "ssh"], "none of srun, mpirun and fork"),
        (["--launcher", "srun", "--gpus", "sim:2"], "needs a Slurm job"),
        (["--gpus", "sim:1", "--python", "/none/python"], "No such file or directory: '/none/python'"),
    ],
)
def test_bad_options(script: str, words: list[str], said: str) -> None:
    done = hpcgpu("launch", *words, script)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_variable_is_named_when_it_is_wrong(script: str) -> None:
    done = hpcgpu("run", script, HPCGPU_NODES="many")
    assert "'many' is not a count" in done.stderr
    assert "set by HPCGPU_NODES" in done.stderr


@pytest.mark.parametrize("command", ["run", "launch", "jobscript"])
def test_a_script_that_is_not_there(command: str, tmp_path: Path) -> None:
    done = hpcgpu(command, "nope.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no script 'nope.py'" in done.stderr


def test_no_mpi_is_said_with_what_to_do(script: str, tmp_path: Path) -> None:
    """A Python without mpirun beside it, and none in PATH."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    argv = [python, "-m", "hpcgpu", "launch", "--launcher", "mpirun", "--gpus", "sim:1", script]
    env = ranks.environment(PATH="/nowhere", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1
    assert "no mpirun and no mpiexec beside this Python or in PATH" in done.stderr
    assert "pip install 'hpcgpu[mpi-runtime]'" in done.stderr


def test_debug_shows_the_traceback(script: str) -> None:
    assert "Traceback" in hpcgpu("run", "--debug", "--nodes", "0", script).stderr
    assert "Traceback" in hpcgpu("--debug", "run", "--nodes", "0", script).stderr


def test_jobscript_prints_what_would_be_submitted(script: str) -> None:
    options = ["--site", "perlmutter", "--nodes", "2", "--account", "m0000", "--walltime", "1h"]
    done = hpcgpu("jobscript", *options, script, "an argument", "--its-own")
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --account=m0000", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4"} <= set(lines)
    assert sum('"an argument","--its-own"' in line for line in lines) == 1


def test_topo_prints_this_machine(script: str) -> None:
    done = hpcgpu("topo", "--gpus", "sim:2")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("worker-")] == [
        "worker-0",
        "worker-1",
    ]


def test_version_and_help() -> None:
    assert hpcgpu("--version").stdout.startswith("hpcgpu 0.")
    for command in ("run", "launch", "jobscript", "topo", "demo"):
        assert command in hpcgpu("--help").stdout
        assert hpcgpu(command, "--help").returncode == 0
