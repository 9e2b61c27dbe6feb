"""The command line as people type it: one clear message, an exit code, no traceback unless asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from ranks import in_process
from waiting import scaled

HPCGPU = str(ranks.BIN / "hpcgpu")


def hpcgpu(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it in a child, for what starts another program."""
    return subprocess.run(
        [HPCGPU, *words], capture_output=True, text=True, timeout=scaled(60), env=ranks.environment(**env)
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    return str(ranks.script(tmp_path, "print('never')"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "sim:1"], "Did you mean"),
        (["--device-memory-limit", "1.5"], "set by option --device-memory-limit"),
        (["--device-memory-limit", "-1"], "allowed: a fraction of the memory"),
        (["--device-memory-limit", "5 Gigs"], "'5GB'"),
        (["--walltime", "2h30"], "'HH:MM:SS'"),
        (["--nodes", "0"], "a whole number from 1"),
        (["--gpus", "sim:2", "--gpus-per-node", "4"], "leave gpus_per_node out"),
        (["--site", "nowhere"], "no site 'nowhere'; there are: "),
        (["--launcher", "ssh"], "allowed: srun, mpirun, fork"),
        (["--launcher", "srun", "--gpus", "sim:2"], "needs a Slurm job"),
    ],
)
def test_bad_options(script: str, words: list[str], said: str) -> None:
    done = in_process("launch", *words, script)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# Where a node's scratch lies is known on the node: a rank says it.
@pytest.mark.parametrize(
    ("words", "code"),
    [("plan --batch slurm --log-directory", 2), ("run --site", 2), ("run --gpus sim:1 --local-directory", 1)],
)
def test_a_home_that_nobody_has(words: str, code: int, script: str) -> None:
    done = (hpcgpu if code == 1 else in_process)(*words.split(), "~hpcgpu-nobody/x", script)
    assert "Traceback" not in done.stderr
    assert "~hpcgpu-nobody" in done.stderr
    assert "give the folder" in done.stderr
    assert done.returncode == code


@pytest.mark.parametrize("command", ["run", "launch", "plan"])
def test_a_script_that_is_not_there(command: str, tmp_path: Path) -> None:
    done = in_process(command, "nope.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no script 'nope.py'" in done.stderr


@pytest.mark.parametrize("command", ["run", "launch"])
def test_no_script_names_the_command_that_was_typed(command: str) -> None:
    done = in_process(command, "--gpus", "sim:2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hpcgpu: the script is missing: hpcgpu {command} [options] script.py [arguments]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--queue", "gpu"], "--queue gpu (set by option --queue): it is asked of a batch system"),
        (["run", "--shape", "elastic"], "SLURMGPUCluster and PBSGPUCluster take it"),
        (["run", "--nodes", "3"], "salloc -N, sbatch -N or qsub -l select= asks for them"),
        (["run", "--launcher", "mpirun"], "'hpcgpu launch' takes it"),
        (["run", "--walltime", "1h"], "hpcgpu run in no job has no time limit"),
        (["launch", "--launcher", "mpirun", "--memory", "8GiB"], "for each worker: memory_limit"),
        (["plan", "--script", "--batch", "slurm", "--gpus", "sim:2", "--shape", "elastic"], "with its script"),
    ],
)
def test_an_option_that_would_do_nothing_is_a_usage_error(script: str, words: list[str], said: str) -> None:
    done = in_process(*words, script)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_wrong_setting_is_named_and_debug_shows_a_traceback(script: str) -> None:
    wrong = in_process("run", script, HPCGPU_NODES="many").stderr
    assert "'many' is not a count" in wrong
    assert "set by HPCGPU_NODES" in wrong
    assert "Traceback" in in_process("run", "--debug", "--nodes", "0", script).stderr
    assert "Traceback" in in_process("--debug", "run", "--nodes", "0", script).stderr
    done = hpcgpu("run", "--python", "/none/python", script, HPCGPU_QUEUE="gpu", HPCGPU_NODES="3")
    assert "o such file or directory: '/none/python'" in done.stderr  # it has come as far as that


def test_launch_without_an_allocation_says_what_to_type(script: str) -> None:
    done = in_process("launch", "--gpus", "sim:1", script, HPCGPU_LAUNCHER="fork")
    assert (done.returncode, done.stdout) == (2, "")
    for way in ("salloc", "qsub -I", "jobscripts/slurm.sbatch", "hpcgpu run", "hpcgpu launch --launcher mpirun"):
        assert way in done.stderr


@pytest.mark.parametrize("written", ['{"id": 1}', "[1]", "half of a fi", ""])
def test_a_scheduler_file_without_an_address_is_named(tmp_path: Path, written: str) -> None:
    (tmp_path / "s.json").write_text(written)
    done = in_process("worker", "--gpus", "sim:1", "--scheduler-file", str(tmp_path / "s.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hpcgpu: --scheduler-file {tmp_path}/s.json has no address of a scheduler")
    done = in_process("worker", "--gpus", "sim:1", "http://there:80")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'http://there:80' is no address of a scheduler; allowed: tcp, tls" in done.stderr
    assert "or give --env UCX_TLS=..." in in_process("worker", "--enable-nvlink", "tcp://there:80").stderr


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


def test_plan_script_prints_what_would_be_submitted(script: str) -> None:
    options = ["--site", "perlmutter", "--nodes", "2", "--account", "m0000", "--walltime", "1h"]
    done = in_process("plan", "--script", *options, script, "an argument", "--its-own")
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --account=m0000", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4"} <= set(lines)
    assert sum('"an argument","--its-own"' in line for line in lines) == 1


@pytest.mark.parametrize(
    ("words", "output", "code"),
    [
        (["--version"], "closed", 0),
        (["topo"], "full", 1),
        (["topo"], "gone", 1),
        (["run", "--nope"], "full-errors", 2),
        (["run", "nope.py"], "no-errors", 2),
        (["launch", "--launcher", "srun", "SCRIPT"], "gone", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_exit_code_does_not_depend_on_who_reads(script: str, words: list[str], output: str, code: int) -> None:
    argv = [HPCGPU, *(script if word == "SCRIPT" else word for word in words)]
    assert ranks.run_unheard(argv, output, ranks.environment()) == code


def test_output_that_cannot_be_written_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([HPCGPU, "topo"], stdout=full, stderr=subprocess.PIPE, text=True, env=ranks.environment())
    assert done.returncode == 1
    assert done.stderr == "hpcgpu: the output could not be written: [Errno 28] No space left on device\n"
