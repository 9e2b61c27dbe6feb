"""A client that dies, interrupted or killed, leaves nothing: no job, running or pending, no folder, no guard."""

import re

import pytest
from lab import Lab
from waiting import until

RUNNING = 'cluster = SLURMGPUCluster(nodes=2, gpus="sim:1", client_grace=5)'
PENDING = 'cluster = SLURMGPUCluster(gpus="sim:2", client_grace=5, job_extra_directives=["--begin=now+1hour"])'


@pytest.mark.parametrize("sig", ["INT", "KILL"])
@pytest.mark.parametrize(("code", "state"), [(RUNNING, "READY"), (PENDING, "PENDING")], ids=["running", "pending"])
def test_a_dead_client_leaves_nothing(slurm_lab: Lab, code: str, state: str, sig: str) -> None:
    slurm_lab.forget_runs()
    with slurm_lab.client() as client:
        client.send(code)
        until(lambda: state in client.said, f"it says {state}", limit_s=240)
        job = re.search(r"job (\d+):", client.said)[1]
        slurm_lab.exec(slurm_lab.login, ["kill", f"-{sig}", str(client.pid)], check=True)
    facts = slurm_lab.wait_job(job)
    if code is PENDING:
        assert facts["JobState"] == "CANCELLED"
    elif sig == "KILL":
        assert facts["ExitCode"] == "0:0"
    until(lambda: not slurm_lab.runs(), "its guard has removed the folder", limit_s=240, every_s=0.2)


@pytest.mark.parametrize("code", [RUNNING, PENDING], ids=["running", "pending"])
def test_job_ends_itself_when_client_and_guard_are_killed(slurm_lab: Lab, code: str) -> None:
    """A pending one when it starts; then ``hpcgpu ps`` removes the folder."""
    slurm_lab.forget_runs()
    with slurm_lab.client() as client:
        client.send(code)
        until(lambda: ("PENDING" if code is PENDING else "READY") in client.said, "it is submitted", limit_s=240)
        job = re.search(r"job (\d+):", client.said)[1]
        slurm_lab.exec(slurm_lab.login, ["pkill", "-KILL", "-f", "[d]eploy.guard"], check=True)
        slurm_lab.exec(slurm_lab.login, ["kill", "-KILL", str(client.pid)], check=True)
    if code is PENDING:
        slurm_lab.root("scontrol", "update", f"JobId={job}", "StartTime=now")
    slurm_lab.wait_job(job)
    slurm_lab.exec(slurm_lab.login, ["hpcgpu", "ps"], check=True)
    assert slurm_lab.runs() == []


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
