"""What the README shows runs as it is written there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import ranks
from lab import CHECKOUT, Lab

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
LINES = [line.partition("  #")[0].strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
RESULT = "largest relative difference"


def line(start: str) -> list[str]:
    return shlex.split(next(text for text in LINES if text.startswith(start)))


@pytest.mark.mpi
@pytest.mark.parametrize("start", ["mpirun ", "hpcgpu run ", "hpcgpu launch --gpus"])
def test_on_this_machine(start: str) -> None:
    env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
    done = subprocess.run(line(start), capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)
    assert (done.returncode, RESULT in done.stdout) == (0, True), done.stderr


@pytest.mark.slurm
def test_the_python_door(slurm_lab: Lab) -> None:
    code = next(text for kind, text in BLOCKS if kind == "python")
    slurm_lab.write("readme.py", code)
    done = slurm_lab.exec(slurm_lab.login, ["python", "readme.py"], timeout=120)
    assert done.stdout.splitlines()[-1] == "6", done.stderr


@pytest.mark.slurm
def test_more_and_fewer(slurm_lab: Lab) -> None:
    first, more = [text for kind, text in BLOCKS if kind == "python"]
    imports = [text for text in first.splitlines() if "import" in text]
    code = "\n".join([*imports, more, '    print(len(client.scheduler_info()["workers"]))', ""])
    slurm_lab.write("more.py", code)
    done = slurm_lab.exec(slurm_lab.login, ["python", "more.py"], timeout=150)
    assert done.stdout.splitlines()[-1] == "12", done.stderr


@pytest.mark.slurm
def test_the_life_of_a_cluster_as_it_is_told(slurm_lab: Lab) -> None:
    page = (ROOT / "docs/explanation/clusters.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    slurm_lab.write("life.py", code)
    done = slurm_lab.exec(slurm_lab.login, ["python", "life.py"], timeout=150)
    assert done.stdout.splitlines()[-1] == "6", done.stderr
    assert re.search(r"^\d+_1  UP 2/2 +workers +1 ", done.stdout, re.M), done.stdout
    assert "READY 6 workers" in done.stdout


@pytest.mark.slurm
def test_the_template_and_launch(slurm_lab: Lab) -> None:
    program, *words = line("sbatch ")
    where = ["--parsable", "--wait", "--output=/home/hpc/readme.log", f"--chdir={CHECKOUT}"]
    words = [f"{CHECKOUT}/{w}" if w.startswith("jobscripts/") else w for w in words]
    done = slurm_lab.exec(slurm_lab.login, [program, *where, *words], timeout=120)
    log = slurm_lab.read("readme.log")
    assert (done.returncode, RESULT in log) == (0, True), log
    for start, said in (("hpcgpu launch --gpus", RESULT), ("hpcgpu launch --print", "srun --nodes=2 --ntasks=9")):
        words = [f"{CHECKOUT}/{w}" if w.startswith("examples/") else w for w in line(start)]
        argv = ["salloc", "-N2", "--ntasks-per-node=4", *words]
        done = slurm_lab.exec(slurm_lab.login, argv, timeout=120)
        assert (done.returncode, said in done.stdout) == (0, True), done.stderr


def test_every_door_is_tried() -> None:
    tried = ("make ", "sbatch ", "hpcgpu launch ", "mpirun ", "hpcgpu run ", "pip install ")
    assert [text for text in LINES if text and not text.startswith(tried)] == []
