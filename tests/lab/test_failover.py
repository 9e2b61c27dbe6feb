"""A rank dies under a launcher of Slurm's jobs, and the run goes on."""

from __future__ import annotations

import pytest
from lab import Lab
from leaders import BEGIN

IN_A_JOB = """
asked = c.map(slow, range(300))
before = addresses()
leader = c.run(os.getpid, nanny=True)[before["node2-0"]]
c.run(os.kill, leader, signal.SIGKILL, workers=[before["node2-0"]], on_error="ignore")
wait(lambda: "node2-0" not in addresses() and "node2-1" not in addresses())
print(c.gather(asked) == list(range(1, 301)), *sorted(addresses()))
"""


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_leader_dies_under_a_launcher_that_keeps_the_others(slurm_lab: Lab, launcher: str) -> None:
    begin = BEGIN.replace("pids = json.load(open(sys.argv[1]))", "")
    code = f"import os, signal, sys, time\nfrom distributed import Client\n{begin}{IN_A_JOB}"
    job = ("salloc", "--quiet", "-N2", "--gpus-per-node=4", "-w", "node1,node2")
    # Open MPI 4, the lab's other mpirun, ends all when a rank dies (docs/decisions/0001)
    launch = ("/opt/venv-wheel/bin/hpcgpu", "launch", "--launcher", launcher, "--gpus", "sim:2")
    done = slurm_lab.python(code, *job, *launch, env={"PMIX_MCA_psec": "native"})
    assert done.stdout == "True node1-0 node1-1\n", done.stderr
    assert "hpcgpu: node node2 lost its leader; its workers are gone" in done.stderr
    # rank 0's, though srun says 137, the highest of its ranks': 128 + 9 of the one that was killed
    assert done.returncode == 0
