"""A client that dies, by whatever signal, leaves nothing: no job, running or pending, no folder, no guard."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
from lab import PATIENCE_S, Lab
from waiting import scaled

RUNNING = """
import time
from hpcgpu import SLURMGPUCluster
cluster = SLURMGPUCluster(nodes=2, gpus="sim:1", client_grace=5, dashboard=False)
print("READY", flush=True)
time.sleep(600)
"""
PENDING = """
from hpcgpu import SLURMGPUCluster
SLURMGPUCluster(gpus="sim:2", client_grace=5, job_extra_directives=["--begin=now+1hour"])
"""


def client(lab: Lab, code: str, until: str) -> tuple[subprocess.Popen[str], str, str]:
    """Start a client in the lab; return it with the ids of its process and of its job once it has said ``until``."""
    # a test that failed may have left a folder: its guard was killed with everything else
    lab.exec(lab.login, ["sh", "-c", "rm -rf .hpcgpu/runs; mkdir -m 700 -p .hpcgpu/runs"], check=True)
    lab.write("client.py", f"import os, sys\nsys.stderr = sys.stdout\nprint('PID', os.getpid(), flush=True)\n{code}")
    running = lab.start(lab.login, ["python", "-u", "client.py"])
    assert running.stdout
    said = ""
    for line in running.stdout:
        said += line
        if until in line:
            found = re.search(r"PID (\d+)\n(?:.|\n)*job (\d+):", said)
            assert found, said
            return running, found[1], found[2]
    raise AssertionError(f"{said}{running.communicate()[1]}")


def folders(lab: Lab) -> list[str]:
    return lab.exec(lab.login, ["ls", ".hpcgpu/runs"], check=True).stdout.split()


def wait_for_no_folder(lab: Lab) -> None:
    end = time.monotonic() + PATIENCE_S
    while there := folders(lab):
        logs = lab.exec(lab.login, ["sh", "-c", "cat .hpcgpu/runs/*/guard.log"]).stdout
        assert time.monotonic() < end, f"{there}: {logs}"
        time.sleep(0.2)


@pytest.mark.parametrize("sig", ["TERM", "HUP", "INT", "KILL"])
@pytest.mark.parametrize(("code", "until"), [(RUNNING, "READY"), (PENDING, "PENDING")], ids=["running", "pending"])
def test_a_dead_client_leaves_nothing(slurm_lab: Lab, code: str, until: str, sig: str) -> None:
    process, pid, job = client(slurm_lab, code, until)
    slurm_lab.exec(slurm_lab.login, ["kill", f"-{sig}", pid], check=True)
    process.communicate(timeout=scaled(60))
    facts = slurm_lab.wait_job(job)
    if code is PENDING:
        assert facts["JobState"] == "CANCELLED"
    wait_for_no_folder(slurm_lab)


def test_a_client_that_closes_takes_its_guard_along(slurm_lab: Lab) -> None:
    code = """
from hpcgpu import SLURMGPUCluster
with SLURMGPUCluster(gpus="sim:2") as cluster:
    print("GUARDS", os.popen("pgrep -fc '[d]eploy.jobs.guard'").read(), flush=True)
folders = os.listdir(os.path.expanduser("~/.hpcgpu/runs"))
print("LEFT", os.popen("pgrep -fc '[d]eploy.jobs.guard'").read(), folders, flush=True)
"""
    slurm_lab.write("client.py", "import os" + code)
    said = slurm_lab.exec(slurm_lab.login, ["python", "client.py"], check=True).stdout
    assert "GUARDS 1\n" in said
    assert "LEFT 0\n []" in said
