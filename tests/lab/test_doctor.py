"""``hpcgpu doctor`` on Slurm: faults that were prepared on its machines are named, with the advice that mends them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import ailing
import pytest
from ailing import Found, check
from lab import NETWORK, Lab
from waiting import scaled, until

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
    left = ["sh", "-c", f"rm -rf {AILING}; ls .hpcgpu/doctor"]
    assert slurm_lab.exec(slurm_lab.login, left, check=True).stdout == ""


def test_ten_faults_of_one_job_are_named_and_the_rest_is_well(ailing_lab: Lab) -> None:
    """None of them hides another. The clock and the network cards are stand-ins: containers have the host's clock."""
    lab = ailing_lab
    words = ("--gpus-per-node", "1", "--cores-per-gpu", "1", "--job-extra-directives", "--gpus-per-node=0")
    mpi = ("--python", "/opt/venv-wheel/bin/python", "--launcher", "/usr/bin/srun --mpi=none")
    more = ("--local-directory", SHARED_MEMORY, "--job-script-prologue", ailing.prologue(AILING, late="node2"))
    with lab.closed_ports("node1", f"{NETWORK}.12"), lab.closed_ports(), full(lab, "node2"):
        found, said = doctor(lab, "--submit", *words, *mpi, *more)
    assert "RUNNING" in said
    assert found["job"]["seen"].endswith("ran on node1, node2")
    check(found, "node to node", "failed", f"node1 to node2 at {NETWORK}.12 (eth0", "timed out", "firewall")
    check(found, "here to nodes", "warning", "timed out", "tunnel")
    check(found, "versions", "failed", f" here and {ailing.OLD_DASK} on node1", "--python")
    check(found, "scratch of the nodes", "failed", f"node2: {SHARED_MEMORY} (tmpfs)", "full", "--local-directory")
    check(found, "locked memory in the job", "warning", "64.0 KiB of memory may be locked", "memlock unlimited")
    check(found, "network ports", "warning", "is down, nearest to the GPU at", "UCX_NET_DEVICES")
    check(found, "launcher and MPI", "failed", "did not meet in one MPI world, but in worlds of 1", "--rendezvous file")
    check(found, "GPUs", "failed", "node1 shows 0 of 1 GPUs (granted: 0)", "--queue", "hpcgpu plan")
    check(found, "CPUs", "warning", "node1: 1 of ", "--cores-per-gpu")
    check(found, "clocks", "warning", "the clock of node1 is 9", "s ahead of that of node2", "chronyd")
    check(found, "socket paths", "warning", "node1: TMPDIR has 120 bytes", "export TMPDIR=/tmp")
    for name in ("job request", "Python", "time", "names", "job", "limits in the job"):
        check(found, name, "ok")
    # a warning if this machine is too busy to write fast
    assert found["home"]["verdict"] == "ok" or "slow" in found["home"]["advice"]


def test_a_home_that_the_nodes_do_not_have_is_named(slurm_lab: Lab) -> None:
    home = "/var/tmp/home-of-the-login-node"
    slurm_lab.exec(slurm_lab.login, ["mkdir", "-m", "700", home], check=True)
    try:
        found, _ = doctor(slurm_lab, "--submit", "--gpus-per-node", "1", home=home)
    finally:
        slurm_lab.exec(slurm_lab.login, ["rm", "-r", home], check=True)
    check(found, "job", "failed", "0 of 2 nodes", "the home is not shared with the nodes")
    check(found, "home", "warning", "seems to be this machine's own")


def test_a_doctor_that_is_killed_leaves_no_pending_job(slurm_lab: Lab) -> None:
    argv = ["python", "-m", "hpcgpu", "doctor", "--submit", "--gpus-per-node", "1"]
    started = [slurm_lab.start(slurm_lab.login, [*argv, "--job-extra-directives", "--begin=now+1hour"]) for _ in "tk"]
    for process in started:
        assert process.stderr
        assert "PENDING" in process.stderr.readline()
    found = slurm_lab.exec(slurm_lab.login, ["pgrep", "-f", "^python -m hpcgpu doctor"], check=True)
    for pid, sig in zip(found.stdout.split(), ("TERM", "KILL"), strict=True):
        slurm_lab.exec(slurm_lab.login, ["kill", f"-{sig}", pid], check=True)
    until(lambda: not slurm_lab.jobs(), "their jobs are cancelled", every_s=0.5)
    ls = ["ls", ".hpcgpu/doctor"]
    until(lambda: not slurm_lab.exec(slurm_lab.login, ls, check=True).stdout, "nothing is left", every_s=0.5)
    for process in started:
        process.communicate(timeout=scaled(60))


def test_a_wrong_account_is_named(accounting_lab: Lab) -> None:
    found, _ = doctor(accounting_lab, "--gpus-per-node", "1", "--account", "nobody")
    check(found, "job request", "failed", "Invalid account", "--account NAME", "sacctmgr show associations")
    found, _ = doctor(accounting_lab, "--gpus-per-node", "1", "--account", "project")
    check(found, "job request", "ok", "slurm would take the job")
