"""The page for those who come from dask-jobqueue: what it shows runs."""

from __future__ import annotations

import shlex

import pytest
from lab import Lab
from pages import after, blocks
from waiting import scaled


@pytest.mark.parametrize("diff", [0, 1], ids=["its cluster", "our cluster"])
def test_dask_jobqueue(slurm_lab: Lab, diff: int) -> None:
    done = slurm_lab.python(after(blocks("dask-jobqueue", "diff")[diff]), timeout=scaled(150))
    assert done.stdout.splitlines()[-1:] == ["6"], done.stderr


def test_slurm_runner(slurm_lab: Lab) -> None:
    slurm_lab.write("script.py", after(blocks("dask-jobqueue", "diff")[2]))
    done = slurm_lab.exec(slurm_lab.login, shlex.split(blocks("dask-jobqueue", "bash")[0]), timeout=scaled(150))
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


@pytest.mark.parametrize("page", ["sbatch", "nemo-curator"])
def test_a_job_script(slurm_lab: Lab, page: str) -> None:
    text = after(blocks(page, "diff")[0]).replace('--container-image="$IMAGE" ', "")  # the lab has no pyxis
    slurm_lab.write("job.sh", text)
    slurm_lab.write("my_script.py", "from distributed import Client\nwith Client() as c: print(len(c.nthreads()))\n")
    argv = ["sbatch", "--wait", "--time=5", "--output=coming.out", "job.sh"]
    done = slurm_lab.exec(slurm_lab.login, argv, timeout=scaled(150))
    log = slurm_lab.exec(slurm_lab.login, ["cat", "coming.out"]).stdout
    printed = [line for line in log.splitlines() if not line.startswith("hpcgpu: ")]
    assert (done.returncode, printed) == (0, ["8"]), done.stderr + log
