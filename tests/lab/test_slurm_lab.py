"""The lab is a real Slurm with real MPI: what the tests of hpcgpu stand on."""

from __future__ import annotations

from lab import CHECKOUT, Lab
from waiting import until


def test_nodes_share_home_and_checkout_and_show_their_gpus(slurm_lab: Lab) -> None:
    slurm_lab.write("shared/hello", "hello\n")
    code = "import hpcgpu, os; print(open('shared/hello').read() + os.environ['CUDA_VISIBLE_DEVICES'], hpcgpu.__file__)"
    srun = ["srun", "-N4", "--gpus-per-node=4", "python", "-c", code]
    text = slurm_lab.exec(slurm_lab.login, srun, check=True).stdout
    assert sorted(text.splitlines()) == [f"0,1,2,3 {CHECKOUT}/hpcgpu/__init__.py"] * 4 + ["hello"] * 4


def test_what_a_test_leaves_behind_is_seen(slurm_lab: Lab) -> None:
    job_id = slurm_lab.submit("#!/bin/bash\nsleep 600\n")
    slurm_lab.wait_job(job_id, {"RUNNING"})

    def is_seen() -> bool:
        left = slurm_lab.wait_idle(timeout=0)
        return all(any(word in thing for thing in left) for word in (job_id, "sleep 600"))

    until(is_seen, "job and process are seen")
    slurm_lab.clean_up()
    assert slurm_lab.wait_idle(timeout=0) == []
