"""``hpcgpu bind``: what the command that it becomes has, under a real mpirun and with the variables of others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bound_ranks
import pytest
import ranks
from fake_nvml import FakeGpu, FakeNvml, compiled
from paths import ROOT, TOPOLOGIES

from hpcgpu.model import CpuSet

BIND = (str(ranks.BIN / "hpcgpu"), "bind")
# What a process says of itself: its mask, its local rank, and the variables of its devices.
FACTS = """
import json, os
names = ("OMPI_COMM_WORLD_LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "UCX_NET_DEVICES", "NCCL_IB_HCA")
print(json.dumps([sorted(os.sched_getaffinity(0)), *map(os.environ.get, names)]))
"""
COMMAND = ("--", sys.executable, "-c", FACTS)
SIMULATED = ("--gpus", "sim:4")
TURIN = {"HWLOC_XMLFILE": str(TOPOLOGIES / "turin-4gpu-nvml.xml")}
WHOLE = [FakeGpu(pci, f"GPU-{i}", size_mib=1024) for i, pci in enumerate(("0000:06:00.0", "0000:16:00.0"))]


with_masks = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="no launcher can bind to less than one PU")


def rank_of(local: int, size: int) -> dict[str, str]:
    """Return the variables of a rank of Open MPI on one node."""
    numbers = {"RANK": local, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


def refused(*options: str, **env: str) -> str:
    done = ranks.run_command([*BIND, *options, *COMMAND], env)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Traceback" not in done.stderr
    assert "or give --any" in done.stderr
    return done.stderr


def test_ranks_of_mpirun_have_the_places_of_workers() -> None:
    allowed = CpuSet(os.sched_getaffinity(0))
    mpirun = [*ranks.MPIRUN, "-n", str(bound_ranks.count(allowed)), BIND[0]]
    done = ranks.run_command([*mpirun, *bound_ranks.words(allowed, sys.executable)])
    assert done.returncode == 0, done.stderr
    bound_ranks.check(done.stdout + done.stderr, os.uname().nodename, allowed)


@with_masks
def test_ranks_of_mpich_are_bound_unless_it_binds_them(mpich: str) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    names = 'import os; print(os.environ["MPI_LOCALRANKID"], *sorted(os.sched_getaffinity(0)))'
    line = ["-n", "2", *BIND, "--gpus", "sim:2", "--", sys.executable, "-c", names]
    done = ranks.run_command([mpich, *line])
    assert done.returncode == 0, done.stderr
    cores = dict(text.split(" ", 1) for text in done.stdout.splitlines())
    assert cores.keys() == {"0", "1"}, done.stdout + done.stderr
    assert cores["0"].split()[0] == str(first)
    assert len(os.sched_getaffinity(0)) > 2 or cores["1"] == str(second)
    bound = ranks.run_command([mpich, "-bind-to", "core", *line])
    assert (bound.returncode != 0, bound.stdout) == (True, "")  # the first rank that ends may end the other
    assert "MPICH mpiexec has bound this rank to PUs" in bound.stderr
    assert "(mpiexec -bind-to none, or I_MPI_PIN=0 for Intel MPI)" in bound.stderr


@with_masks
def test_mask_of_mpirun_is_refused_and_the_way_named() -> None:
    mpirun = [*ranks.MPIRUN[:1], "--bind-to", "hwthread", "--use-hwthread-cpus", "-n", "1"]
    done = ranks.run_command([*mpirun, *BIND, "--gpus", "sim:1", *COMMAND])
    assert done.returncode == 1
    assert re.search(r"mpirun has bound this rank to PUs \d+, .*\(mpirun --bind-to none\)", done.stderr)
    done = ranks.run_command([*mpirun, *BIND, "--gpus", "sim:1", "--any", *COMMAND])
    assert done.returncode == 0
    assert len(json.loads(done.stdout)[0]) == 1, "unbound is what the launcher left"
    assert "rank 0 is not bound: " in done.stderr


@with_masks
def test_masks_of_srun_are_shared_out_again() -> None:
    """As srun --cpu-bind=map_cpu has set the variables (22.05.8): rank 0 was bound to the second PU."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_CPU_BIND_TYPE": "map_cpu:"}
    bound = ["taskset", "-c", str(second), *BIND, "--gpus", "sim:2", *COMMAND]
    done = ranks.run_command(bound, {**step, "SLURM_CPU_BIND_LIST": f"{second},{first}"})
    assert json.loads(done.stdout)[0] == [first], done.stderr
    done = ranks.run_command(bound, {**step, "SLURM_CPU_BIND_LIST": f"{first},{second}"})
    assert done.returncode == 1, "Slurm's numbers are not the kernel's"
    assert f"srun has bound this rank to PUs {second}, " in done.stderr
    assert "(srun --cpu-bind=none)" in done.stderr


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.mark.parametrize("local", [0, 1])
def test_rank_sees_its_gpu_and_the_ports_of_its_worker(nvml: FakeNvml, local: int) -> None:
    """As tests/process/agent/test_nvidia_run.py has them for the workers of this machine."""
    env = {**nvml.environment(WHOLE), **TURIN, **rank_of(local, 2)}
    done = ranks.run_command([*BIND, *COMMAND], env)
    assert done.returncode == 0, done.stderr
    cores, _, devices, ports, hca = json.loads(done.stdout)
    assert (devices, ports, hca) == (f"GPU-{local}", f"mlx5_{4 + local}:1", "=mlx5_4:1,mlx5_5:1")
    assert set(cores) <= os.sched_getaffinity(0)


def test_one_rank_has_all_gpus_of_its_node(nvml: FakeNvml) -> None:
    done = ranks.run_command([*BIND, *COMMAND], {**nvml.environment(WHOLE), **TURIN, **rank_of(0, 1)})
    assert json.loads(done.stdout)[2:4] == ["GPU-0,GPU-1", "mlx5_4:1,mlx5_5:1"], done.stderr


def test_dry_run_prints_lines_for_a_shell(nvml: FakeNvml) -> None:
    env = {**nvml.environment(WHOLE), **TURIN, **rank_of(1, 2)}
    done = ranks.run_command([*BIND, "--dry-run"], env)
    assert done.returncode == 0, done.stderr
    shell = ["sh", "-c", 'eval "$1"; exec "$2" -c "$3"', "sh", done.stdout, sys.executable, FACTS]
    after = subprocess.run(shell, capture_output=True, text=True, env={**os.environ, **rank_of(1, 2)}, check=True)
    cores, *rest = json.loads(after.stdout)
    assert rest == ["1", "GPU-1", "mlx5_5:1", "=mlx5_4:1,mlx5_5:1"]
    assert set(cores) == os.sched_getaffinity(0), "a shell's cores stay"


def test_command_has_arguments_streams_and_exit_code(tmp_path: Path) -> None:
    env = rank_of(0, 1)
    line = ["--gpus", "sim:1", "--", "sh", "-c", 'cat; echo "$1" >&2; exit 7', "sh", "-- --report"]
    done = subprocess.run([*BIND, *line], input="in", capture_output=True, text=True, env=ranks.environment(**env))
    assert (done.returncode, done.stdout, done.stderr) == (7, "in", "-- --report\n")


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        ((), {}, "this process, in no job, has no number among the ranks of its node: no launcher has started it"),
        ((), {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "this process, in job 7 of slurm, has no number"),
        ((), {"PMI_RANK": "1", "PMI_SIZE": "4"}, "MPICH mpiexec has numbered it 1 of 4, but not among those of its"),
        (SIMULATED, rank_of(0, 3), "3 ranks on this node do not match 4 GPUs"),
        (SIMULATED, rank_of(0, 6), "start 1, 2, 4 or a multiple of 4"),
        (SIMULATED, {**rank_of(0, 64), **TURIN}, "64 ranks on .* may use PUs .* only, of 128 cores"),
    ],
    ids=["alone", "batch-script", "no-local-number", "too-few", "too-many", "narrow-mask"],
)
def test_rank_without_a_place_is_told_two_ways_out(options: tuple[str, ...], env: dict[str, str], message: str) -> None:
    assert re.search(message, refused(*options, **env))


def test_node_without_gpus_is_an_error_and_any_runs_all_the_same(nvml: FakeNvml) -> None:
    hidden = {**nvml.environment(WHOLE), **TURIN, **rank_of(0, 1), "CUDA_VISIBLE_DEVICES": ""}
    assert "no GPU can be used on" in (stderr := refused(**hidden))
    assert "CUDA_VISIBLE_DEVICES=''" in stderr
    done = ranks.run_command([*BIND, "--any", *COMMAND], hidden)
    assert (done.returncode, json.loads(done.stdout)[2]) == (0, "")


def test_wrong_command_line_is_refused_as_usage() -> None:
    for line, message in (
        (("bind", "--report"), "needs a command"),
        (("bind", "--reprot", "--", "true"), "No such option"),
        (("bind", "--gpus", "4", "--", "true"), "does not describe simulated GPUs"),
        (("bind", "--gpus", "sim:1", "--", "/no/such"), "/no/such could not be started: No such file or directory"),
    ):
        done = ranks.run_command([BIND[0], *line], rank_of(0, 1))
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


def test_rank_imports_the_standard_library_alone() -> None:
    """Without site-packages, so that anything else would be an error; and of the library little."""
    code = """if True:
        import sys
        from hpcgpu.cli import main
        sys.argv = ["hpcgpu", "bind", "--gpus", "sim:1", "--", "/no/such"]
        try:
            main()
        finally:
            print("modules", *sys.modules)
    """
    env = {**rank_of(0, 1), "PYTHONPATH": str(ROOT)}
    done = ranks.run_command([sys.executable, "-S", "-c", code], env)
    assert done.returncode == 2, done.stderr
    modules = set(done.stdout.rpartition("modules")[2].split())
    assert "hpcgpu.plan.binding.ranks" in modules
    heavy = {"asyncio", "contextlib", "enum", "importlib", "re", "signal", "subprocess", "typing", "xml"}
    assert modules & {*heavy, "hpcgpu.agent", "hpcgpu.host.process", "hpcgpu.model.settings"} == set()
