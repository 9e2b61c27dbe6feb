"""The command line as people type it: one clear message, an exit code, no traceback unless asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import streams
from waiting import scaled

HPCGPU = str(ranks.BIN / "hpcgpu")


def hpcgpu(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCGPU, *words], capture_output=True, text=True, timeout=scaled(60), env=ranks.environment(**env), cwd=cwd
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    return str(ranks.script(tmp_path, "print('never')"))


NOT_FOUND = "o such file or directory: '/none/python'"


@pytest.mark.parametrize(
    ("typed", "code", "message"),
    [
        ("launch --gpu sim:1", 2, "Did you mean"),
        ("launch --device-memory-limit 1.5", 2, "set by option --device-memory-limit"),
        ("launch --device-memory-limit -1", 2, "allowed: a fraction of the memory"),
        ("launch --walltime 2h30", 2, "'HH:MM:SS'"),
        ("launch --nodes 0", 2, "a whole number from 1"),
        ("launch --gpus sim:2 --gpus-per-node 4", 2, "leave gpus_per_node out"),
        ("launch --site nowhere", 2, "no site 'nowhere'; there are: "),
        ("launch --launcher ssh", 1, "none of srun, mpirun and fork"),
        ("launch --launcher srun --gpus sim:2", 1, "needs a Slurm job"),
        ("launch --gpus sim:1 --launcher fork --python /none/python", 1, NOT_FOUND),
        ("launch --launcher mpirun --memory 8GiB", 2, "for each worker: memory_limit"),
        ("jobscript --batch slurm --log-directory ~hpcgpu-nobody/x", 2, "give the folder"),
        ("jobscript --batch slurm --gpus sim:2 --shape elastic", 2, "with its script"),
        ("run --site ~hpcgpu-nobody/x", 2, "give the folder"),
        # where a node's scratch lies is known on the node: a rank reports it
        ("run --gpus sim:1 --local-directory ~hpcgpu-nobody/x", 1, "give the folder"),
        ("run --queue gpu", 2, "--queue gpu (set by option --queue): it is asked of a batch system"),
        ("run --shape elastic", 2, "SLURMGPUCluster and PBSGPUCluster take it"),
        ("run --nodes 3", 2, "salloc -N, sbatch -N or qsub -l select= asks for them"),
        ("run --launcher mpirun", 2, "'hpcgpu launch' takes it"),
        ("run --walltime 1h", 2, "hpcgpu run in no job has no time limit"),
    ],
)
def test_bad_options_are_errors_with_advice(script: str, typed: str, code: int, message: str) -> None:
    done = hpcgpu(*typed.split(), script)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["run", "launch", "jobscript"])
def test_missing_scripts_are_errors_with_the_command(command: str, tmp_path: Path) -> None:
    done = hpcgpu(command, "nope.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no script 'nope.py'" in done.stderr
    if command != "jobscript":
        done = hpcgpu(command, "--gpus", "sim:2")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(f"script is missing: hpcgpu {command} [options] script.py [arguments]\n")


def test_variables_are_named_if_wrong_and_ignored_if_for_jobs(script: str) -> None:
    done = hpcgpu("run", script, HPCGPU_NODES="many")
    assert "'many' is not a count" in done.stderr
    assert "set by HPCGPU_NODES" in done.stderr
    done = hpcgpu("run", "--python", "/none/python", script, HPCGPU_QUEUE="gpu", HPCGPU_NODES="3")
    assert NOT_FOUND in done.stderr  # it has come as far as that


@pytest.mark.parametrize("words", [[], ["--print"]])
def test_launch_without_an_allocation_says_what_to_type(script: str, words: list[str]) -> None:
    done = hpcgpu("launch", *words, "--gpus", "sim:1", script, HPCGPU_LAUNCHER="fork")
    assert (done.returncode, done.stdout) == (2, "")
    for way in ("salloc", "qsub -I", "jobscripts/slurm.sbatch", "hpcgpu run", "hpcgpu launch --launcher mpirun"):
        assert way in done.stderr
    # whoever names a launcher means this machine
    printed = hpcgpu("launch", "--print", "--launcher", "fork", "--gpus", "sim:1", "--ranks", "node", script, "--mine")
    assert printed.stdout.endswith(f"/hpcgpu run --gpus sim:1 {script} --mine\n"), printed.stderr


@pytest.mark.parametrize("written", ['{"id": 1}', "[1]", "half of a fi", ""])
def test_worker_names_a_scheduler_file_without_an_address(tmp_path: Path, written: str) -> None:
    (tmp_path / "s.json").write_text(written)
    done = hpcgpu("worker", "--gpus", "sim:1", "--scheduler-file", str(tmp_path / "s.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hpcgpu: --scheduler-file {tmp_path}/s.json has no address of a scheduler")


def test_worker_refuses_an_address_of_another_protocol() -> None:
    argv = [sys.executable, "-m", "hpcgpu.worker", "--gpus", "sim:1", "http://there:80"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=ranks.environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert "'http://there:80' is no address of a scheduler; allowed: tcp, tls" in done.stderr


def test_what_diff_would_ignore_is_refused() -> None:
    done = hpcgpu("topo", "--diff", "--workers", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--workers with --diff" in done.stderr


def test_no_mpi_is_said_with_what_to_do(script: str, tmp_path: Path) -> None:
    """A Python without mpirun beside it, and none in PATH."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    argv = [python, "-m", "hpcgpu", "launch", "--launcher", "mpirun", "--gpus", "sim:1", script]
    env = ranks.environment(PATH="/nowhere", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=env)
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


def test_version_and_help() -> None:
    assert hpcgpu("--version").stdout.startswith("hpcgpu 0.")
    assert "jobscript" in hpcgpu("--help").stdout


@pytest.mark.parametrize(
    ("words", "output", "code"),
    [
        (["--version"], "closed", 0),
        (["--version"], "no-errors", 0),
        (["topo"], "gone", 1),
        (["run", "--nope"], "full-errors", 2),
        (["run", "--nope"], "closed", 2),
        (["run", "nope.py"], "full", 2),
        (["run", "nope.py"], "no-errors", 2),
        (["launch", "--launcher", "srun", "SCRIPT"], "gone", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_exit_code_does_not_depend_on_who_reads(script: str, words: list[str], output: str, code: int) -> None:
    argv = [HPCGPU, *(script if word == "SCRIPT" else word for word in words)]
    assert streams.run(argv, output, ranks.environment()) == code


def test_output_that_cannot_be_written_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([HPCGPU, "topo"], stdout=full, stderr=subprocess.PIPE, text=True, env=ranks.environment())
    assert done.returncode == 1
    assert done.stderr == "hpcgpu: the output could not be written: [Errno 28] No space left on device\n"
