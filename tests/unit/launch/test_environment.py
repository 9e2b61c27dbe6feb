"""A rank's place in its world, from environments recorded under the real launchers.

``tests/data/launch/environment``: rank 3 of 5 on 2 nodes (3 + 2) of a Slurm 22.05.8 with GPUs, rank 1 of 3 on one
machine without a batch system; names of machines replaced.
"""

from __future__ import annotations

import pytest
from paths import DATA

from hpcgpu.config.layers import read_settings
from hpcgpu.host.process import LAUNCHER
from hpcgpu.launch import (
    brought,
    inherited_variables,
    is_isolated,
    read_allocation,
    read_launch,
    read_rank,
)
from hpcgpu.model import Allocation, RankFacts
from hpcgpu.model.allocation import JOB_MEMORY, JOB_NODES, JOB_RESTARTS, SCRIPT_ADDRESS, SCRIPT_ENV

RECORDED = DATA / "launch/environment"


def recorded(name: str) -> dict[str, str]:
    lines = (RECORDED / f"{name}.txt").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("openmpi-5-mpirun", RankFacts(1, 3, 1, 3, "Open MPI mpirun")),
        ("mpich-mpiexec", RankFacts(1, 3, 1, 3, "MPICH mpiexec")),
        ("srun-pmix", RankFacts(3, 5, 0, None, "srun", "pmix")),
        ("srun-pmi2", RankFacts(3, 5, 0, None, "srun", "pmi2")),
        ("srun-none", RankFacts(3, 5, 0, None, "srun", "")),
        ("openmpi-4-mpirun-in-salloc", RankFacts(3, 5, 0, 2, "Open MPI mpirun")),
        ("openmpi-5-mpirun-in-salloc", RankFacts(3, 5, 0, 2, "Open MPI mpirun")),
        ("sbatch", RankFacts()),
        ("salloc", RankFacts()),
    ],
)
def test_a_rank_knows_its_place(name: str, facts: RankFacts) -> None:
    assert read_rank(recorded(name)) == facts


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("openmpi-5-mpirun", "prterun-node1-4201@1"),
        ("openmpi-5-mpirun-in-salloc", "prterun-slurmctld-4247@1"),
        ("openmpi-4-mpirun-in-salloc", "4078698497"),
        ("srun-none", "82.0"),
        ("srun-pmix", "80.0"),
        ("mpich-mpiexec", ""),
        ("sbatch", ""),
    ],
)
def test_launches_of_one_job_are_told_apart(name: str, launch: str) -> None:
    assert read_launch(recorded(name)) == launch
    assert read_launch(recorded(name) | {"PBS_JOBID": "7.login01"}) == launch


def test_variables_of_mpiruns_daemon_are_not_the_ranks() -> None:
    environ = recorded("openmpi-4-mpirun-in-salloc")
    assert (environ["SLURM_PROCID"], environ["SLURM_NTASKS"]) == ("1", "2")
    assert (read_rank(environ).rank, read_rank(environ).size) == (3, 5)
    # mpiexec(1) of PALS, "Environment variables"; no machine of this kind was at hand to record
    environ = {"PALS_RANKID": "3", "PMI_RANK": "3", "PMI_SIZE": "5", "PALS_LOCAL_RANKID": "0", "PMI_LOCAL_SIZE": "2"}
    assert read_rank(environ) == RankFacts(3, 5, 0, 2, "PALS mpiexec")


def test_the_job_around_a_rank() -> None:
    for name in ("sbatch", "salloc"):
        found = read_allocation(recorded(name))
        assert (found.batch, found.node_count, found.gpus_per_node) == ("slurm", 2, 4)
    for written in ("4", "gpu:4", "a100:4", "gpu:a100:4", "4(x2)"):
        assert read_allocation(recorded("salloc") | {"SLURM_GPUS_PER_NODE": written}).gpus_per_node == 4
    # as sbatch --array=3-5 sets them, Slurm 22.05: SLURM_JOB_ID is a raw number that squeue does not show
    array = {"SLURM_JOB_ID": "125", "SLURM_ARRAY_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "4"}
    assert read_allocation(recorded("sbatch") | array).job_id == "123_4"
    assert read_allocation({"PBS_JOBID": "123[4].server"}).job_id == "123[4].server"
    assert read_allocation(recorded("sbatch")).memory == (4000 << 20, "--mem of the job: SLURM_MEM_PER_NODE=4000")
    step = read_allocation(recorded("srun-pmix"))
    assert (step.node_name, step.node_count, step.restart_count, step.rank.rank) == ("node2", 2, 0, 3)
    again = recorded("sbatch") | {"SLURM_RESTART_COUNT": "2"}
    assert read_allocation(again).restart_count == 2
    assert read_allocation(recorded("openmpi-5-mpirun")).batch == "local"
    assert read_allocation({"HPCGPU_JOB_ID": "9"}) == Allocation(job_id="9")
    assert read_allocation({"PBS_JOBID": "7.login01"}) == Allocation(batch="pbs", job_id="7.login01")


@pytest.mark.parametrize("name", ["sbatch", "srun-pmix", "openmpi-5-mpirun-in-salloc"])
def test_another_job_inherits_the_users_variables_only(name: str) -> None:
    """srun would take SLURM_MEM_PER_NODE for an option; of a run, the scheduler is this job's."""
    own = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "OMPI_MCA_btl": "tcp", "HPCGPU_QUEUE": "gpu", "DASK_X": "1"}
    of_script = {"HPCGPU_SCRIPT_ENV": "DASK_SCHEDULER_ADDRESS,HPCGPU_SCRIPT_SCHEDULER", "HPCGPU_SCRIPT_SCHEDULER": "a"}
    environ = {**recorded(name), **own, **of_script, "DASK_SCHEDULER_ADDRESS": "a"}
    left = environ.keys() - inherited_variables(environ)
    assert own.keys() <= left
    theirs = ("SLURM", "PMIX_", "OMPI_COMM", "HPCGPU_SCRIPT", "DASK_S")
    assert not [n for n in left - own.keys() if n.startswith(theirs)]
    assert inherited_variables(own | {"SLURM_MPI_TYPE": "pmix"}) == frozenset()  # on a login node all is the user's


def test_no_variable_of_ours_is_taken_for_an_option() -> None:
    """A script in a run that makes a cluster reads options from an environment with all of them."""
    ours = (LAUNCHER, JOB_NODES, JOB_RESTARTS, JOB_MEMORY, SCRIPT_ADDRESS, SCRIPT_ENV)
    assert read_settings({}, environ=dict.fromkeys(ours, "x")).sources == {}


# As set in a job of Slurm 22.05.8 on 4 of a node's cores with 4 GPUs, and in its steps, by each option of sbatch.
@pytest.mark.parametrize(
    ("set_by_slurm", "mib"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, 2048),
        ({"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_ON_NODE": "4"}, 2000),
        ({"SLURM_MEM_PER_GPU": "1024", "SLURM_GPUS_ON_NODE": "4"}, 4096),
        ({"SLURM_CPUS_ON_NODE": "4"}, None),  # --mem=0, and no option at all
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "500"}, None),
        ({"SLURM_MEM_PER_NODE": "2G"}, None),  # not what Slurm writes
    ],
)
def test_the_memory_that_the_job_has_asked_for(set_by_slurm: dict[str, str], mib: int | None) -> None:
    bare = {k: v for k, v in recorded("salloc").items() if "MEM_PER" not in k and "_ON_NODE" not in k}
    found = read_allocation(bare | set_by_slurm).memory
    assert (found.nbytes >> 20 if found else None) == mib
    if found:  # the words name what was set
        assert all(f"{name}={value}" in found.source for name, value in set_by_slurm.items())


@pytest.mark.parametrize(
    ("set_by_slurm", "isolated"),
    [
        ({"SLURMD_TRES_BIND": "gpu:single:1"}, True),
        ({"SLURMD_TRES_BIND": "gpu:verbose,map_gpu:0,1"}, True),
        ({"SLURMD_TRES_BIND": "gpu:closest"}, True),
        ({"SLURMD_TRES_BIND": "gpu:none"}, False),
        ({"SLURMD_TRES_BIND": "gpu:none", "SLURM_GPUS_PER_TASK": "1"}, False),  # srun --gpu-bind=none undoes it
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_GPU_BIND": "single:1"}, True),
        ({"SLURM_GPU_BIND": "none"}, False),
        ({}, False),
    ],
)
def test_tasks_with_gpus_of_their_own_are_seen(set_by_slurm: dict[str, str], isolated: bool) -> None:
    assert is_isolated(recorded("srun-none") | set_by_slurm) == isolated
    assert is_isolated(recorded("srun-gpus-per-task"))


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
