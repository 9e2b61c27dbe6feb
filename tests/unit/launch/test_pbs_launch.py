"""Ranks on the nodes of a PBS job: which launcher, what it is told, and real ones of two nodes without ssh.

The nodes are namespaces of this machine with host names of their own; pbs_tmrsh is replaced by a program that does
what it was recorded to do (release/20-job-environment, 27-mpi): it runs an argv, no shell line, in an environment
with ``PATH=/bin:/usr/bin`` and little else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from paths import DATA

from hpcgpu.deploy.settings import in_job
from hpcgpu.errors import LaunchError
from hpcgpu.launch.environment import brought, read_allocation
from hpcgpu.launch.launcher import LauncherFacts, plan_launch
from hpcgpu.model import Allocation, Settings
from hpcgpu.model.layout import World
from hpcgpu.model.site import Site
from hpcgpu.model.site_facts import Launcher

VERSIONS = DATA / "launch/version"
RANK = ("python", "-m", "hpcgpu.agent", "a document")
TWO = World(nodes=2, per_node=4, hosts=("node0001", "node0002"), variables=("FOO", "PATH"))
PBS = Allocation(batch="pbs", job_id="7.login01")
OPENMPI = LauncherFacts(
    mpirun="/opt/mpirun", mpirun_version=(VERSIONS / "mpirun-openmpi-5.0.11.txt").read_text(), remote_shell="/x/ssh"
)
PALS = replace(OPENMPI, pals="/opt/cray/pals/mpiexec")


def test_the_order_is_the_sites_own_then_pals_then_mpirun() -> None:
    site = Site(name="here", batch="pbs", launcher=Launcher(command=("/opt/start", "--all")))
    assert plan_launch(RANK, Settings(), PBS, OPENMPI, TWO).argv[0] == "/opt/mpirun"
    argv = plan_launch(RANK, Settings(), PBS, PALS, TWO).argv
    flags = ("--no-abort-on-failure", "--cpu-bind", "none", "--ppn", "5", "-n", "10")
    assert argv == ("/opt/cray/pals/mpiexec", *flags, *RANK)
    own = in_job(Settings(), site, "pbs")
    assert own.where("launcher") == "site here"
    start = replace(PALS, mpirun="/opt/start", mpirun_version="")
    assert plan_launch(RANK, own, PBS, start, TWO).argv == ("/opt/start", "--all", *RANK)
    assert in_job(Settings(launcher="mpirun"), site, "pbs").launcher == "mpirun"
    assert in_job(Settings(), site, "local").launcher is None
    # PALS starts no ranks that do not understand it
    found = replace(PALS, library="Open MPI v5.0.11, package: Open MPI")
    assert plan_launch(RANK, Settings(), PBS, found, TWO).argv[0] == "/opt/mpirun"
    assert plan_launch(RANK, Settings(rendezvous="file"), PBS, found, TWO).argv[0] == PALS.pals


def test_pbs_reaches_other_nodes_with_the_scripts_variables() -> None:
    launch = plan_launch(RANK, Settings(), PBS, OPENMPI, TWO)
    assert " --bind-to none --host node0001:4,node0002:4 -x FOO -x PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["PRTE_MCA_plm_ssh_agent"] == "/x/ssh"
    assert plan_launch(RANK, Settings(), PBS, OPENMPI, World(hosts=("node0001",))).env == ()
    hydra = replace(OPENMPI, mpirun_version=(VERSIONS / "mpiexec-mpich-5.0.2.txt").read_text())
    launch = plan_launch(RANK, Settings(), PBS, hydra, TWO)
    assert " -bind-to none -hosts node0001,node0002 -genvlist FOO,PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["HYDRA_LAUNCHER_EXEC"] == "/x/ssh"
    # the user's words stand before ours
    settings = Settings(launcher="mpirun --mca btl 'self,tcp'")
    argv = plan_launch(RANK, settings, PBS, OPENMPI, TWO).argv
    assert argv[:5] == ("/opt/mpirun", "--mca", "btl", "self,tcp", "--continuous")


@pytest.mark.parametrize(
    ("launcher", "found", "words"),
    [
        ("ssh", OPENMPI, "launcher='ssh' .* allowed: srun, mpirun, fork, or a command"),
        ("pals", PALS, "launcher='pals' .* allowed: srun"),
        ("/opt/none -x", LauncherFacts(), "there is no program /opt/none on this node"),
        ("mpirun 'x", OPENMPI, "No closing quotation"),
    ],
)
def test_what_is_no_launcher_is_refused(launcher: str, found: LauncherFacts, words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        plan_launch(RANK, Settings(launcher=launcher), PBS, found, TWO)


def test_what_each_node_has_of_its_own_is_not_brought_to_others() -> None:
    ours = {"PATH": "/x/bin", "LD_LIBRARY_PATH": "/x/lib", "HPCGPU_NODES": "2", "OMP_NUM_THREADS": "4"}
    theirs = {
        **{"PBS_JOBID": "7.login01", "PBS_NODENUM": "0", "NCPUS": "4", "TMPDIR": "/var/tmp/pbs.7.login01"},
        **{"OMPI_MCA_btl": "self", "PWD": "/home/u", "_": "/bin/env", "BASH_FUNC_module%%": "() { :; }"},
        "CUDA_VISIBLE_DEVICES": "GPU-8ef5,GPU-11aa",
    }
    assert set(brought(ours | theirs)) == set(ours)
    assert "CUDA_VISIBLE_DEVICES" in brought({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "TMPDIR" in brought({"TMPDIR": "/local", "PBS_JOBID": "7.login01"})
    # what PBS does not count is counted
    environ = {"PBS_JOBID": "7.login01", "HPCGPU_JOB_NODES": "3", "HPCGPU_JOB_RESTARTS": "1"}
    found = read_allocation(environ)
    assert (found.node_count, found.restart_count) == (3, 1)
