"""What the README, the ways to start and the page on clusters show runs on Slurm as it is written there."""

import re
import shlex

import doc_blocks
from lab import Lab
from pages import README, line
from paths import ROOT
from waiting import scaled

RESULT = "largest relative difference"


def of_the_lab(page: str, file: str = "") -> str:
    """Return the block of Python that is marked for the lab, the only one or that of a file."""
    blocks = [b for b in doc_blocks.blocks(ROOT / page) if b.how == "lab" and b.kind == "python"]
    (code,) = [b.text for b in blocks if not file or b.file == file]
    return code


def test_the_python_of_the_readme(slurm_lab: Lab) -> None:
    code = next(text for kind, text in README if kind == "python")
    done = slurm_lab.python(code)
    assert done.stdout.splitlines()[-1] == "6", done.stderr


def test_the_life_of_a_cluster_as_it_is_told(slurm_lab: Lab) -> None:
    done = slurm_lab.python(of_the_lab("docs/explanation/clusters.md", "life.py"), timeout=scaled(150))
    assert done.stdout.splitlines()[-1] == "6", done.stderr
    assert re.search(r"^\d+_1  UP 2/2 +workers +1 ", done.stdout, re.M), done.stdout
    assert "hpcgpu: READY 6 workers" in done.stderr


def test_two_kinds_of_jobs_as_it_is_told(slurm_lab: Lab) -> None:
    done = slurm_lab.python(of_the_lab("docs/explanation/clusters.md", "pools.py"), timeout=scaled(150))
    assert done.stdout.splitlines()[-1] == "6", done.stderr
    assert re.search(r"^\d+ +UP 2/2 +workers of cpu +1 ", done.stdout, re.M), done.stdout


def as_a_newcomer(lab: Lab, *typed: str) -> str:
    """Type lines on the login node that ``make slurm-shell`` opens; return what they print."""
    lines = "".join(f"{words} < /dev/null\n" for words in typed)  # what comes after is the shell's
    done = lab.lab_sh("shell", timeout=scaled(170), typed=lines)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_template(slurm_lab: Lab) -> None:
    sbatch = shlex.join(line("sbatch ")).replace("sbatch", "sbatch --wait", 1)
    assert as_a_newcomer(slurm_lab, "rm -f slurm-*.out", sbatch, "cat slurm-*.out").count(RESULT) == 1


def test_launch(slurm_lab: Lab) -> None:
    shown, run = (shlex.join(line(start)) for start in ("hpcgpu plan --script", "hpcgpu launch --gpus"))
    said = as_a_newcomer(slurm_lab, f"salloc -N2 --ntasks-per-node=4 {shown}", f"salloc --ntasks-per-node=4 {run}")
    assert "srun --nodes=2 --ntasks=9" in said
    assert said.count(RESULT) == 1


def test_the_tutorials_cluster_of_two_nodes(slurm_lab: Lab) -> None:
    done = slurm_lab.python(of_the_lab("docs/tutorial/slurm-lab.md"), timeout=scaled(150))
    assert done.stdout.splitlines()[-1:] == ["285"], done.stderr
