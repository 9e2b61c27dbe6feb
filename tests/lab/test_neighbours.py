"""Another user of the cluster's nodes, who can reach every port and read every process's words."""

import re

import pytest
import sockets
from lab import Lab
from waiting import until

# Open MPI's handshake begins so; then silence.
KNOCK = """
import itertools, socket, sys
keep = []
print("READY", flush=True)
for port in itertools.cycle(range(int(sys.argv[1]), int(sys.argv[2]))):
    for node in ("node1", "node2"):
        s = socket.socket()
        s.settimeout(0.5)
        try:
            s.connect((node, port))
            s.send(b"OM")
            keep = keep[-200:] + [s]
            print("IN", port, flush=True)
        except OSError:
            s.close()
"""
OPTIONS = 'nodes=2, gpus="sim:2", job_extra_directives=["--nodelist=node1,node2"], death_timeout=40'
RUN = f"""
from distributed import Client
from hpcgpu import SLURMGPUCluster
with SLURMGPUCluster({OPTIONS}) as cluster, Client(cluster) as client:
    print(client.submit(sum, [1, 2]).result(), len(client.scheduler_info(n_workers=-1)["workers"]))
"""


def test_ranks_meet_though_a_neighbour_knocks_at_open_mpis_ports(slurm_lab: Lab) -> None:
    with slurm_lab.start("node4", ["python3", "-c", KNOCK, "1024", "1040"]) as neighbour:
        try:
            assert neighbour.stdout.readline() == "READY\n"
            assert slurm_lab.python(RUN).stdout.endswith("3 4\n")
        finally:
            slurm_lab.exec("node4", ["pkill", "-f", '[b]"OM"'])


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_values_of_env_and_prologue_stand_in_no_command(slurm_lab: Lab, launcher: str) -> None:
    """Also where srun is to hand no variables on, and where a neighbour has taken Open MPI 4's folder on the node."""
    taken = f"/tmp/ompi.node1.{slurm_lab.exec('node1', ['id', '-u']).stdout.strip()}"
    slurm_lab.root("sh", "-c", f"rm -rf {taken}; mkdir -m 700 {taken}", container="node1")
    more = f'launcher="{launcher}", env={{"DB_URL": "hunter2"}}, job_script_prologue=["export WANDB=hunter4"]'
    directive = '"--export=NONE", ' if launcher == "srun" else ""
    options = OPTIONS.replace('["--node', f'[{directive}"--node')
    with slurm_lab.client() as client:
        client(f"cluster = SLURMGPUCluster({options}, {more})\nclient = Client(cluster)")
        client("values = set(client.run(os.getenv, 'DB_URL').values())")
        assert client("list(values)") == ["hunter2"]
        words = [slurm_lab.root("ps", "axww", container=node) for node in ("node1", "node2")]
        client("client.close()\ncluster.close()")
    slurm_lab.root("rmdir", taken, container="node1")
    assert all("hpcgpu" in listed for listed in words)
    assert not [line for listed in words for line in listed.splitlines() if "hunter" in line]


def test_folder_of_open_mpi_4_taken_on_another_node_is_not_used(slurm_lab: Lab) -> None:
    taken = f"/tmp/ompi.node2.{slurm_lab.exec('node2', ['id', '-u']).stdout.strip()}"
    slurm_lab.root("sh", "-c", f"mkdir -m 700 {taken}; chown nobody {taken}", container="node2")
    before = slurm_lab.root("ls", "/tmp", container="node2").split()  # also what other tests have left
    with slurm_lab.client() as client:
        client(f'cluster = SLURMGPUCluster({OPTIONS}, launcher="mpirun")\nclient = Client(cluster)')
        seen = client("list(client.run(os.listdir, '/tmp').values())")
        client("client.close()\ncluster.close()")
    left = slurm_lab.root("ls", "/tmp", container="node2").split()
    slurm_lab.root("rmdir", taken, container="node2")
    assert len(seen) == 4
    private = sorted(any(name.startswith("hpcgpu-launch-") for name in names) for names in seen)
    version = slurm_lab.exec("node2", ["mpirun", "--version"], check=True).stdout
    # Open MPI 5 names its folder after a process: only on the node that starts mpirun it is put into one of ours.
    assert private == [") 4." in version] * 2 + [True, True], version
    assert set(left) <= set(before)


def test_srun_and_slurmstepd_listen_as_documented(slurm_lab: Lab) -> None:
    """slurmstepd's socket is inherited by what it starts; srun is on the first node alone."""
    slurm_lab.needs_pmix()
    job = slurm_lab.submit("#!/bin/sh\nexec srun --mpi=pmix sleep 600", "--nodes=2", "--nodelist=node1,node2")

    def listening(node: str) -> dict[str, list[str]]:
        lines = [line.split() for line in slurm_lab.root("ss", "-Hltnp", container=node).splitlines()]
        found: dict[str, list[str]] = {}
        for *_, where, _, users in (line for line in lines if len(line) == 6):
            for program in set(re.findall(r'"(\w+)"', users)) - {"slurmd"}:
                place = "loopback" if where.startswith("127.") else "all interfaces"
                found[program] = sorted([*found.get(program, []), place])
        return found

    try:
        step = {"slurmstepd": ["all interfaces", "loopback"], "sleep": ["all interfaces"]}
        both = [{**step, "srun": ["all interfaces"] * 4}, step]
        until(lambda: [listening("node1"), listening("node2")] == both, "both nodes listen as documented", limit_s=120)
    finally:
        slurm_lab.root("scancel", job)
    assert {"all interfaces"} == {where for kind, where in sockets.documented("srun") if kind == "TCP"} - {"loopback"}
