"""A client that dies, interrupted or killed, leaves nothing: no job, running or pending, no folder, no guard."""

from __future__ import annotations

import re

import pytest
from lab import Lab
from waiting import scaled, until

BEGIN = "import os, sys, time\nfrom hpcgpu import SLURMGPUCluster\nsys.stderr = sys.stdout\nprint('PID', os.getpid())\n"
RUNNING = 'SLURMGPUCluster(nodes=2, gpus="sim:1", client_grace=5); print("READY", flush=True); time.sleep(600)'
PENDING = 'SLURMGPUCluster(gpus="sim:2", client_grace=5, job_extra_directives=["--begin=now+1hour"])'


@pytest.mark.parametrize("sig", ["INT", "KILL"])
@pytest.mark.parametrize(("code", "state"), [(RUNNING, "READY"), (PENDING, "PENDING")], ids=["running", "pending"])
def test_a_dead_client_leaves_nothing(slurm_lab: Lab, code: str, state: str, sig: str) -> None:
    slurm_lab.forget_runs()
    slurm_lab.write("client.py", BEGIN + code)
    client = slurm_lab.start(slurm_lab.login, ["python", "-u", "client.py"])
    text = ""
    for line in client.stdout:
        text += line
        if state in line:
            break
    ids = re.search(r"PID (\d+)\n(?:.|\n)*job (\d+):", text)
    assert ids, text
    slurm_lab.exec(slurm_lab.login, ["kill", f"-{sig}", ids[1]], check=True)
    client.communicate(timeout=scaled(60))
    facts = slurm_lab.wait_job(ids[2])
    if code is PENDING:
        assert facts["JobState"] == "CANCELLED"
    elif sig == "KILL":
        assert facts["ExitCode"] == "0:0"
    until(lambda: not slurm_lab.runs(), "its guard has removed the folder", limit_s=240, every_s=0.2)


def test_a_client_that_closes_takes_its_guard_along(slurm_lab: Lab) -> None:
    slurm_lab.forget_runs()
    code = """
    import os
    from hpcgpu import SLURMGPUCluster
    with SLURMGPUCluster(gpus="sim:2") as cluster:
        print("GUARDS", os.popen("pgrep -fc '[d]eploy.guard'").read())
    print("LEFT", os.popen("pgrep -fc '[d]eploy.guard'").read())
    """
    assert re.findall(r"(GUARDS|LEFT) (\d+)", slurm_lab.python(code).stdout) == [("GUARDS", "1"), ("LEFT", "0")]
    assert slurm_lab.runs() == []
