"""Ranks that mpirun and mpiexec start here: as the command lines promise, and in a job of PBS on two nodes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import ranks
import two_nodes
from launch_probe import ME, PROBE, check
from paths import ROOT
from programs import program
from ranks import environment
from waiting import scaled

from hpcgpu import config
from hpcgpu.launch.launchers import mpirun_command, read_flavour
from hpcgpu.model import RunDocument, Settings
from hpcgpu.model.allocation import DOCUMENT, World

SCRIPT = """
import json
def facts(dask_worker):
    e = os.environ
    place = socket.gethostname(), dask_worker.memory_manager.memory_limit
    return [*place, e.get("MARK"), e["PATH"], e.get("CUDA_VISIBLE_DEVICES"), e["OMP_NUM_THREADS"]]
import socket
with Client() as client:
    client.wait_for_workers(4)
    print("FACTS", json.dumps(list(client.run(facts).values())))
"""


@pytest.mark.parametrize("launcher", ["open-mpi", "mpich", "pbs_tmrsh"])
def test_ranks_of_two_nodes_meet_without_ssh(launcher: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    script = ranks.script(tmp_path, textwrap.dedent(SCRIPT))
    options = ["--gpus", "sim:2x64MiB"]
    if launcher == "mpich":
        options += ["--launcher", request.getfixturevalue("mpich"), "--rendezvous", "file"]
    if launcher == "pbs_tmrsh":
        options += ["--launcher", "pbs_tmrsh", "--rendezvous", "file"]
    argv = [*two_nodes.prefix(tmp_path), str(ranks.BIN / "hpcgpu"), "launch", *options, str(script)]
    two_nodes.grant(tmp_path, "2gb", "1048576kb")
    env = two_nodes.environment(tmp_path)
    done = ranks.run_command(argv, env, scaled(120))
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if "FACTS" in line).partition("FACTS ")[2])
    # what PBS has granted of each node, less the simulated GPUs' own
    limits = {"node0001": (2048 - 2 * 64) << 19, "node0002": (1024 - 2 * 64) << 19}
    assert sorted((host, limit) for host, limit, *_ in found) == sorted([*limits.items()] * 2)
    assert (tmp_path / "qstat.log").read_text() == "-f -F json 7.login01\n"
    assert {(mark, path) for _, _, mark, path, *_ in found} == {('of the "script"', env["PATH"])}
    assert {(host, gpus) for host, *_, gpus, _ in found} == {("node0001", "GPU-of-node0001"), ("node0002", None)}
    assert {threads for *_, threads in found} == {"1"}, "PBS has set it to the job's cores on each node"
    assert "--env changes it" in done.stderr
    assert (tmp_path / "tmrsh.log").read_text().startswith("node0002 /bin/sh -c ")
    assert "of the" not in (tmp_path / "tmrsh.log").read_text(), "a variable may be secret, all see a command line"
    assert list((tmp_path / ".hpcgpu" / "launches").iterdir()) == []


def test_ranks_of_one_node_start_without_ssh(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    (tmp_path / "nodes").write_text(os.uname().nodename + "\n")
    job = {"PBS_JOBID": "7", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": f"{tmp_path}/nodes", "PATH": str(tmp_path)}
    done = ranks.run_command([f"{ranks.BIN}/hpcgpu", "launch", "--gpus", "sim:2", f"{ROOT}/examples/svd.py"], job)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("shell", "words"), [("tcsh", "/x/tcsh -f -c"), ("csh", "/x/csh -f -c"), ("fish", "/bin/sh -c")]
)
def test_a_csh_gets_the_line_that_was_written_for_it(shell: str, words: str, tmp_path: Path) -> None:
    """Open MPI writes its line for the user's login shell."""
    program(tmp_path / "getent", f"echo u:x:1:1::/home/u:/x/{shell}")
    program(tmp_path / "pbs_tmrsh", 'printf "%s\\n" "$@"')
    argv = [ROOT / "hpcgpu/host/pbs_ssh.sh", "-x", "-l", "u", "node2", "set path = ( /x $path ) ;", "prted --a 'b'"]
    done = subprocess.run(argv, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["node2", *words.split(), "set path = ( /x $path ) ; prted --a 'b'"]


def test_two_launches_at_once_in_one_job_do_not_meet_each_other(tmp_path: Path) -> None:
    (tmp_path / "nodefile").write_text(f"{os.uname().nodename}\n")
    script = ranks.script(tmp_path, "with Client() as c:\n    print(sys.argv[1], len(c.scheduler_info()['workers']))")
    env = ranks.environment(PBS_JOBID="7.login01", PBS_NODEFILE=str(tmp_path / "nodefile"), HOME=str(tmp_path))
    argv = [str(ranks.BIN / "hpcgpu"), "launch", "--rendezvous", "file", "--gpus"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    both = [subprocess.Popen([*argv, f"sim:{n}", str(script), f"wants {n}"], **pipes) for n in (2, 3)]
    said = [launch.communicate(timeout=scaled(120)) for launch in both]
    assert [out for out, _ in said] == ["wants 2 2\n", "wants 3 3\n"], said
    assert list((tmp_path / ".hpcgpu" / "rendezvous").iterdir()) == []


def test_by_mpichs_own_mpiexec_ranks_cannot_meet_by_files(mpich: str, tmp_path: Path) -> None:
    script = ranks.script(tmp_path, "pass")
    argv = [mpich, "-n", "2", str(ranks.BIN / "hpcgpu"), "run", "--rendezvous", "file", "--gpus", "sim:1", str(script)]
    done = ranks.run_command(argv, {"PBS_JOBID": "7.login01"})
    assert done.returncode != 0
    assert "rendezvous='file' needs 'hpcgpu launch', srun" in done.stderr


def test_a_job_whose_chunks_are_on_one_node_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nodefile").write_text("node0001\nnode0001\n")
    run = RunDocument(settings=Settings(nodes=2, gpus="sim:2"), shape="gang", folder=str(tmp_path))
    env = {"PBS_JOBID": "7.login01", "PBS_NODEFILE": str(tmp_path / "nodefile"), DOCUMENT: config.render_document(run)}
    done = ranks.run_command([sys.executable, "-m", "hpcgpu", "launch", "--document"], env)
    assert done.returncode != 0
    assert "the request was for 2 nodes (default), but PBS has put this job on 1 (node0001)" in done.stderr
    assert "place=scatter" in done.stderr
    assert "a hook of the site has changed it: qstat -f 7.login01" in done.stderr


def here(argv: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, PROBE, "localhost", *argv]
    out = subprocess.run(command, capture_output=True, text=True, timeout=scaled(90), env=environment(), cwd=ROOT)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_mpich_here(mpich: str) -> None:
    version = subprocess.run([mpich, "--version"], capture_output=True, text=True, timeout=scaled(20)).stdout
    assert read_flavour(version) == "mpich"
    world = World(per_node=3)
    seen = here(mpirun_command(ME, world, mpich, "mpich"))
    check(seen, world, [seen["ranks"][0]["host"]])
    assert {r["launcher"] for r in seen["ranks"]} == {"MPICH mpiexec"}


def test_mpich_deals_ranks_out_over_its_hosts(mpich: str) -> None:
    # Two names of this machine, each with a proxy of its own: PMI counts per proxy.
    world = World(nodes=2, per_node=2, hosts=("localhost", "127.0.0.1"))
    program, *rest = mpirun_command(ME, world, mpich, "mpich")
    seen = here((program, "-launcher", "fork", *rest))
    assert [(r["local_rank"], r["local_size"]) for r in seen["ranks"]] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]
