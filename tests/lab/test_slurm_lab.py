"""The lab is a real Slurm with real MPI: what the tests of hpcgpu stand on."""

from __future__ import annotations

import re

import pytest
from lab import CHECKOUT, NETWORK, Lab
from waiting import scaled, until

WORLD = "from mpi4py import MPI; c = MPI.COMM_WORLD; print('rank', c.rank, 'of', c.size)"
WHEEL = "/opt/venv-wheel/bin"


def test_nodes_share_home_and_checkout_and_show_their_gpus(slurm_lab: Lab) -> None:
    slurm_lab.write("shared/hello", "hello\n")
    code = "import hpcgpu, os; print(open('shared/hello').read() + os.environ['CUDA_VISIBLE_DEVICES'], hpcgpu.__file__)"
    srun = ["srun", "-N4", "--gpus-per-node=4", "python", "-c", code]
    text = slurm_lab.exec(slurm_lab.login, srun, check=True).stdout
    assert sorted(text.splitlines()) == [f"0,1,2,3 {CHECKOUT}/hpcgpu/__init__.py"] * 4 + ["hello"] * 4


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (("srun", "--mpi=pmix", "-n4", "/opt/venv/bin/python"), 4),
        (("srun", "--mpi=pmix", "-n4", f"{WHEEL}/python"), 4),
        (("/usr/bin/mpirun", "/opt/venv/bin/python"), 4),
        ((f"{WHEEL}/mpirun", f"{WHEEL}/python"), 4),
        (("srun", "--mpi=none", "-n4", f"{WHEEL}/python"), 1),
    ],
    ids=["srun-4", "srun-5", "mpirun-4", "mpirun-5", "no-pmi"],
)
def test_ranks_of_a_launcher_make_one_world_by_pmi_alone(slurm_lab: Lab, words: tuple[str, ...], size: int) -> None:
    argv = ["salloc", "-N2", "--ntasks-per-node=2", *words, "-c", WORLD]
    text = slurm_lab.exec(slurm_lab.login, argv, env={"PMIX_MCA_psec": "native"}, check=True).stdout
    ranks = sorted(re.findall(r"rank (\d) of (\d)", text))
    assert ranks == sorted((str(i % size), str(size)) for i in range(4))


def test_a_firewall_leaves_slurm_but_no_other_port(slurm_lab: Lab) -> None:
    listen = "import socket; s = socket.create_server(('', 7777)); print('up', flush=True); s.accept()"
    connect = f"import socket; socket.create_connection(('{NETWORK}.11', 7777), timeout=2)"
    server = slurm_lab.start("node1", ["python", "-c", listen])
    assert server.stdout
    assert server.stdout.readline() == "up\n"
    with slurm_lab.closed_ports():
        assert "TimeoutError" in slurm_lab.exec(slurm_lab.login, ["python", "-c", connect]).stderr
        assert slurm_lab.exec(slurm_lab.login, ["srun", "-w", "node1", "hostname"], check=True).stdout == "node1\n"
    slurm_lab.exec(slurm_lab.login, ["python", "-c", connect], check=True)
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
