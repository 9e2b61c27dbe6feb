"""Ranks on the nodes of a PBS job: which launcher, what it is told, and real ones of two nodes without ssh.

The nodes are namespaces of this machine with host names of their own; pbs_tmrsh is replaced by a program that does
what it was recorded to do (release/20-job-environment, 27-mpi): it runs an argv, no shell line, in an environment
with ``PATH=/bin:/usr/bin`` and little else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import ranks

from hpcgpu.deploy.settings import in_job
from hpcgpu.errors import LaunchError
from hpcgpu.launch.environment import brought, read_allocation
from hpcgpu.model import Allocation, RunDocument, Settings
from hpcgpu.model.site import Site
from hpcgpu.model.world import World
from hpcgpu.plan.launcher import Found, plan_launch

VERSIONS = Path(__file__).parent / "data/launch/version"
RANK = ("python", "-m", "hpcgpu.agent", "a document")
TWO = World(nodes=2, per_node=4, hosts=("node0001", "node0002"), variables=("FOO", "PATH"))
PBS = Allocation(batch="pbs", job_id="7.login01")
OPENMPI = Found(
    mpirun="/opt/mpirun", mpirun_version=(VERSIONS / "mpirun-openmpi-5.0.11.txt").read_text(), remote_shell="/x/ssh"
)
PALS = replace(OPENMPI, pals="/opt/cray/pals/mpiexec")


def test_the_order_is_the_sites_own_then_pals_then_mpirun() -> None:
    site = Site(name="here", batch="pbs", dialect={"launcher": ("/opt/start", "--all")})
    assert plan_launch(RANK, Settings(), PBS, OPENMPI, TWO).argv[0] == "/opt/mpirun"
    argv = plan_launch(RANK, Settings(), PBS, PALS, TWO).argv
    flags = ("--no-abort-on-failure", "--cpu-bind", "none", "--ppn", "5", "-n", "10")
    assert argv == ("/opt/cray/pals/mpiexec", *flags, *RANK)
    own = in_job(Settings(), site, "pbs")
    assert own.where("launcher") == "site here: dialect.launcher"
    assert plan_launch(RANK, own, PBS, replace(PALS, mpirun="/opt/start", mpirun_version=""), TWO).argv == (
        *("/opt/start", "--all"),
        *RANK,
    )
    assert in_job(Settings(launcher="mpirun"), site, "pbs").launcher == "mpirun"
    assert in_job(Settings(), site, "local").launcher is None


def test_pals_starts_no_ranks_that_do_not_understand_it() -> None:
    found = replace(PALS, library="Open MPI v5.0.11, package: Open MPI")
    assert plan_launch(RANK, Settings(), PBS, found, TWO).argv[0] == "/opt/mpirun"
    assert plan_launch(RANK, Settings(rendezvous="file"), PBS, found, TWO).argv[0] == PALS.pals


def test_other_nodes_are_reached_by_pbs_and_get_what_the_script_has_set() -> None:
    launch = plan_launch(RANK, Settings(), PBS, OPENMPI, TWO)
    assert " --bind-to none --host node0001:4,node0002:4 -x FOO -x PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["PRTE_MCA_plm_ssh_agent"] == "/x/ssh"
    assert plan_launch(RANK, Settings(), PBS, OPENMPI, World(hosts=("node0001",))).env == ()
    hydra = replace(OPENMPI, mpirun_version=(VERSIONS / "mpiexec-mpich-5.0.2.txt").read_text())
    launch = plan_launch(RANK, Settings(), PBS, hydra, TWO)
    assert " -bind-to none -hosts node0001,node0002 -genvlist FOO,PATH -n 9 " in " ".join(launch.argv)
    assert dict(launch.env)["HYDRA_LAUNCHER_EXEC"] == "/x/ssh"


def test_an_mpirun_of_the_users_own_words_gets_our_flags_after_them() -> None:
    settings = Settings(launcher="mpirun --mca btl 'self,tcp'")
    argv = plan_launch(RANK, settings, PBS, OPENMPI, TWO).argv
    assert argv[:5] == ("/opt/mpirun", "--mca", "btl", "self,tcp", "--continuous")


@pytest.mark.parametrize(
    ("launcher", "found", "words"),
    [
        ("ssh", OPENMPI, "launcher='ssh' .* is none of srun, mpirun and fork, nor a command"),
        ("pals", PALS, "launcher='pals' .* is none of"),
        ("/opt/none -x", Found(), "there is no program /opt/none on this node"),
        ("mpirun 'x", OPENMPI, "No closing quotation"),
    ],
)
def test_what_is_no_launcher_is_refused(launcher: str, found: Found, words: str) -> None:
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


def test_what_pbs_does_not_count_is_counted() -> None:
    environ = {"PBS_JOBID": "7.login01", "HPCGPU_JOB_NODES": "3", "HPCGPU_JOB_RESTARTS": "1"}
    found = read_allocation(environ)
    assert (found.node_count, found.restart_count) == (3, 1)


TMRSH = """\
#!/bin/bash
echo "$@" >> {folder}/tmrsh.log
node=$1; shift
task=(HOME="$HOME" PATH=/bin:/usr/bin PBS_JOBID=7.login01 PBS_NODENUM=1 NCPUS=2 OMP_NUM_THREADS=2)
exec unshare --uts env -i "${{task[@]}}" bash -c 'hostname "$0" && exec "$@"' "$node" "$@"
"""
# Both nodes have the addresses of this machine, which Open MPI cannot know; MPICH wants names that it can look up.
JOB = """\
hostname node0001
mount --bind {folder}/hosts /etc/hosts
export PBS_JOBID=7.login01 PBS_NODEFILE={folder}/nodefile OMPI_MCA_btl_tcp_if_include=lo
export MARK='of the "script"' CUDA_VISIBLE_DEVICES=GPU-of-node0001
exec "$@"
"""
SCRIPT = """
import json
def facts():
    return [socket.gethostname(), os.environ.get("MARK"), os.environ["PATH"], os.environ.get("CUDA_VISIBLE_DEVICES")]
import socket
with Client() as client:
    client.wait_for_workers(4)
    print("FACTS", json.dumps(list(client.run(facts).values())))
"""


@pytest.fixture
def two_nodes(tmp_path: Path) -> list[str]:
    """A prefix that runs a command on the first node of a job of two."""
    inside = ["unshare", "--uts", "--mount", "--map-root-user"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for users here (unshare --uts --map-root-user)")
    (tmp_path / "nodefile").write_text("node0001\nnode0001\nnode0002\nnode0002\n")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost node0001\n203.0.113.2 node0002\n")
    tmrsh = tmp_path / "bin" / "pbs_tmrsh"
    tmrsh.parent.mkdir()
    tmrsh.write_text(TMRSH.format(folder=tmp_path))
    tmrsh.chmod(0o755)
    return [*inside, "bash", "-c", JOB.format(folder=tmp_path), "job"]


@pytest.mark.mpi
@pytest.mark.parametrize("program", ["open-mpi", "mpich"])
def test_ranks_of_two_nodes_meet_without_ssh(
    program: str, two_nodes: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    script = ranks.script(tmp_path, textwrap.dedent(SCRIPT))
    options = ["--gpus", "sim:2", "--nodes", "2"]
    if program == "mpich":
        options += ["--launcher", request.getfixturevalue("mpich"), "--rendezvous", "file"]
    argv = [*two_nodes, str(ranks.BIN / "hpcgpu"), "launch", *options, str(script)]
    env = ranks.environment(PATH=f"{tmp_path}/bin:{ranks.BIN}:{os.environ['PATH']}", HOME=str(tmp_path))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if "FACTS" in line).partition("FACTS ")[2])
    assert sorted(host for host, *_ in found) == ["node0001"] * 2 + ["node0002"] * 2
    assert {(mark, path) for _, mark, path, _ in found} == {('of the "script"', env["PATH"])}
    assert {(host, gpus) for host, *_, gpus in found} == {("node0001", "GPU-of-node0001"), ("node0002", None)}
    assert (tmp_path / "tmrsh.log").read_text().startswith("node0002 /bin/sh -c ")


@pytest.mark.mpi
def test_two_launches_at_once_in_one_job_do_not_meet_each_other(tmp_path: Path) -> None:
    (tmp_path / "nodefile").write_text(f"{os.uname().nodename}\n")
    script = ranks.script(tmp_path, "with Client() as c:\n    print(sys.argv[1], len(c.scheduler_info()['workers']))")
    env = ranks.environment(PBS_JOBID="7.login01", PBS_NODEFILE=str(tmp_path / "nodefile"), HOME=str(tmp_path))
    argv = [str(ranks.BIN / "hpcgpu"), "launch", "--rendezvous", "file", "--gpus"]
    both = [
        subprocess.Popen(
            [*argv, f"sim:{n}", str(script), f"wants {n}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for n in (2, 3)
    ]
    said = [launch.communicate(timeout=120) for launch in both]
    assert [out for out, _ in said] == ["wants 2 2\n", "wants 3 3\n"], said
    assert list((tmp_path / ".hpcgpu" / "meetings").iterdir()) == []


@pytest.mark.mpi
def test_by_mpichs_own_mpiexec_ranks_cannot_meet_by_files(mpich: str, tmp_path: Path) -> None:
    script = ranks.script(tmp_path, "pass")
    argv = [mpich, "-n", "2", str(ranks.BIN / "hpcgpu"), "run", "--rendezvous", "file", "--gpus", "sim:1", str(script)]
    env = ranks.environment(PBS_JOBID="7.login01", HOME=str(tmp_path))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)
    assert done.returncode != 0
    assert "rendezvous='file' needs 'hpcgpu launch', srun" in done.stderr


@pytest.mark.mpi
def test_a_job_whose_chunks_are_on_one_node_says_how_to_scatter_them(tmp_path: Path) -> None:
    from hpcgpu.config import document

    (tmp_path / "nodefile").write_text("node0001\nnode0001\n")
    env = ranks.environment(PBS_JOBID="7.login01", PBS_NODEFILE=str(tmp_path / "nodefile"))
    run = RunDocument(settings=Settings(nodes=2, gpus="sim:2"), shape="gang", meeting=str(tmp_path))
    argv = [sys.executable, "-m", "hpcgpu", "launch", "--document", document.render(run)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode != 0
    assert "2 nodes were asked for (default), but PBS has put this job on 1 (node0001)" in done.stderr
    assert "place=scatter" in done.stderr
