"""``hpcgpu doctor`` on Slurm: faults that were prepared on its machines are named, with the advice that mends them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import ailing
import pytest
from ailing import Found, check
from lab import NETWORK, Lab

AILING = "/home/hpc/ailing"
SHARED_MEMORY = "/dev/shm"


def doctor(lab: Lab, *words: str, home: str = "") -> tuple[Found, str]:
    """Return what a doctor on the login node finds, by the names of its checks, and what it says meanwhile."""
    env = {"HOME": home} if home else {}
    argv = ["python", "-m", "hpcgpu", "doctor", "--json", *words]
    done = lab.exec(lab.login, argv, env=env)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["exit_code"] == done.returncode
    return ailing.read(done.stdout), done.stderr


@contextlib.contextmanager
def full(lab: Lab, node: str) -> Iterator[None]:
    """Fill the small file system in a node's memory."""
    file = f"{SHARED_MEMORY}/fills-it"
    lab.exec(node, ["sh", "-c", f"cat /dev/zero > {file}"])
    try:
        yield
    finally:
        lab.exec(node, ["rm", file], check=True)


@pytest.fixture
def ailing_lab(slurm_lab: Lab, tmp_path: Path) -> Iterator[Lab]:
    unpack = f"mkdir -p {AILING}; base64 -d | tar xz -C {AILING}"
    slurm_lab.exec(slurm_lab.login, ["sh", "-c", unpack], stdin=ailing.tarball(tmp_path), check=True)
    yield slurm_lab
    left = ["sh", "-c", f"rm -rf {AILING}; grep -l hpcgpu-doctor .hpcgpu/runs/*/record"]
    assert slurm_lab.exec(slurm_lab.login, left).stdout == ""


def test_ten_faults_of_one_job_are_named_and_the_rest_is_well(ailing_lab: Lab) -> None:
    """None of them hides another. The clock and the network cards are stand-ins: containers have the host's clock."""
    lab = ailing_lab
    options = ("--gpus-per-node", "1", "--cores-per-gpu", "1", "--job-extra-directives", "--gpus-per-node=0")
    mpi = ("--python", "/opt/venv-wheel/bin/python", "--launcher", "/usr/bin/srun --mpi=none")
    more = ("--local-directory", SHARED_MEMORY, "--job-script-prologue", ailing.prologue(AILING, late="node2"))
    with lab.closed_ports("node1", f"{NETWORK}.12"), lab.closed_ports(), full(lab, "node2"):
        findings, stderr = doctor(lab, "--submit", *options, *mpi, *more)
    assert "RUNNING" in stderr
    assert findings["job"]["seen"].endswith("ran on node1, node2")
    ailing.check_prepared(findings)
    check(findings, "node to node", "failed", f"at {NETWORK}.12 (eth0")
    check(findings, "here to nodes", "warning", "timed out", "tunnel")
    check(findings, "launcher and MPI", "failed", "did not meet in one MPI world, but in worlds of 1")
    check(findings, "clocks", "warning", "the clock of node1 is 9", "s ahead of that of node2")
    for name in ("job request", "Python", "time", "names", "job", "limits in the job"):
        check(findings, name, "ok")
    # a warning if this machine is too busy to write fast
    assert findings["home"]["verdict"] == "ok" or "slow" in findings["home"]["advice"]


def test_a_home_that_the_nodes_do_not_have_is_named(slurm_lab: Lab) -> None:
    home = "/var/tmp/home-of-the-login-node"
    slurm_lab.exec(slurm_lab.login, ["mkdir", "-m", "700", home], check=True)
    try:
        findings, _ = doctor(slurm_lab, "--submit", "--gpus-per-node", "1", home=home)
    finally:
        slurm_lab.exec(slurm_lab.login, ["rm", "-r", home], check=True)
    check(findings, "job", "failed", "0 of 2 nodes", "the home is not shared with the nodes")
    check(findings, "home", "warning", "seems to exist on this machine only")
