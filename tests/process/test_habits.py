"""Habits of users of Dask's other clusters: what they type is answered in the words of the door that they use."""

import re
import sys
from pathlib import Path

import pytest
import ranks
from distributed import Client
from waiting import until

import hpcgpu
from hpcgpu import ConfigError, LocalGPUCluster, PBSGPUCluster, SLURMGPUCluster
from hpcgpu.config.migration import FIELD
from hpcgpu.errors import plain, whole

# Jupyter interrupts a cell by a signal to the process group of its kernel, as a terminal does.
INTERRUPTED = """
import os, signal
from distributed import Client
from hpcgpu import LocalGPUCluster

def interrupt():
    os.killpg(os.getpgrp(), signal.SIGINT)
    signal.pause()

cluster = LocalGPUCluster(gpus="sim:2x64MiB", quiet=True)
client = Client(cluster)
kept = client.scatter(41)
try:
    interrupt()
except KeyboardInterrupt:
    print("interrupted", client.submit(lambda x: x + 1, kept).result(60), cluster.job_id, flush=True)
interrupt()
"""
INTERRUPTED_START = """
import os, signal, threading
from hpcgpu import LocalGPUCluster
from hpcgpu.deploy.cluster.local_run import LocalRun

async def interrupted(*arguments, start=LocalRun.start):
    await start(*arguments)
    os.kill(os.getpid(), signal.SIGINT)

LocalRun.start = interrupted
try:
    LocalGPUCluster(gpus="sim:1x64MiB", quiet=True)
except KeyboardInterrupt:
    for thread in threading.enumerate():  # asyncio's, of Python 3.11, wait for the end of the ranks
        if thread.name.startswith(("asyncio-waitpid", "waitpid")):
            thread.join()
    print("interrupted")
"""
LONG_EXIT = """
import atexit, os, signal, time
from distributed import Client
from hpcgpu import LocalGPUCluster

def upload():
    time.sleep(3)  # three times client_grace
    print(client.submit(sum, [1, 2]).result())
    os.kill(scheduler, signal.SIGKILL)
    while "lost: the ranks ended with exit code 70" not in repr(cluster):
        time.sleep(0.05)

cluster = LocalGPUCluster(gpus="sim:1x64MiB", quiet=True, client_grace=1)
client = Client(cluster)
scheduler = client.run_on_scheduler(os.getpid)
atexit.register(upload)
"""


def test_interrupt_ends_a_script_but_not_the_cluster_of_a_cell(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    done = ranks.run_command(["setsid", "--wait", sys.executable, str(tmp_path / "script.py")])
    *said, pid = done.stdout.split()
    assert said == ["interrupted", "42"], done.stderr
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    until(lambda: not Path(f"/proc/{pid}").exists(), "the ranks end with the script")


def test_interrupted_start_ends_the_ranks_and_says_no_more(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED_START)
    done = ranks.run_command([sys.executable, str(tmp_path / "script.py")])
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_functions_of_atexit_have_their_cluster_and_its_end(tmp_path: Path) -> None:
    """Python has shut its threads down by then."""
    (tmp_path / "script.py").write_text(LONG_EXIT)
    done = ranks.run_command([sys.executable, str(tmp_path / "script.py")])
    assert done.stdout == "3\n", done.stderr
    assert "RuntimeError" not in done.stderr


def fails(call: object, *words: object, **options: object) -> str:
    with pytest.raises(ConfigError) as refused:
        call(*words, **options)
    return str(refused.value)


@pytest.mark.parametrize("kind", [SLURMGPUCluster, PBSGPUCluster])
def test_cores_without_a_request_are_refused_before_submission(kind: type) -> None:
    said = fails(kind, gpus_per_node=4, cores=8)
    assert f"cores=8 (set by keyword cores of {kind.__name__}) binds each worker" in said
    assert "cores_per_gpu=2" in said
    assert "cores_per_gpu=2" in fails(kind, gpus_per_node=4, cores=8, cores_per_gpu=2)


def test_words_of_the_field_are_answered() -> None:
    for name in ("mem_per_gpu", "num_workers", "qos"):
        said = fails(SLURMGPUCluster, **{name: 1})
        assert f"{name}=1, set by keyword {name} of SLURMGPUCluster: give " in said
    advised = {re.search(r"give (\w+)", plain(hint.instead))[1] for hint in FIELD.values()}
    assert advised <= SLURMGPUCluster.__signature__.parameters.keys()
    said = fails(SLURMGPUCluster, job_extra_directives=["--gres=gpu:4"])
    assert "instead of --gres=gpu:4" in said
    assert "give gpus_per_node=4" in said


def test_names_of_other_packages_lead_to_ours() -> None:
    ours = {"SLURMCluster": "SLURMGPUCluster", "PBSCluster": "PBSGPUCluster", "LocalCUDACluster": "LocalGPUCluster"}
    for name, instead in ours.items():
        with pytest.raises(ImportError, match=f"its name here is {instead}: from hpcgpu import {instead}"):
            exec(f"from hpcgpu import {name}")
        assert hasattr(hpcgpu, instead)
    assert not hasattr(hpcgpu, "nothing")


def test_local_cluster_answers_habits() -> None:
    assert "gpus_per_node=2 or gpus='sim:2'" in fails(LocalGPUCluster, 2)
    assert "leaves no worker: give cpu_workers=4 too, or a GPU" in fails(LocalGPUCluster, n_workers=0)
    with LocalGPUCluster(gpus="sim:2x64MiB", quiet=True) as cluster, Client(cluster):
        said = fails(cluster.wait_for_workers, 3)
        assert "wait_for_workers(3): this cluster always has 2 workers" in said
        cluster.wait_for_workers(2)
        assert "connect by Client(cluster)" in repr(cluster)
        assert "OS threads" in str(cluster.bindings())
        for name, words in (("workers", "scheduler_info"), ("scheduler", "scheduler_address")):
            with pytest.raises(AttributeError, match=words):
                getattr(cluster, name)
        assert not hasattr(cluster, "nothing")


def test_local_errors_advise_what_works_here() -> None:
    """Without a GPU: the advice of the error is followed."""
    with pytest.raises(hpcgpu.JobError) as failed:
        LocalGPUCluster(quiet=True)
    said = whole(failed.value)
    assert "simulate them by the option gpus, as sim:4" in said
    assert said.count("'hpcgpu doctor' looks for the cause on this machine") == 1
    assert "make a new cluster" in said.splitlines()[0]
    with pytest.raises(hpcgpu.ConfigError) as failed:
        LocalGPUCluster(gpus="sim:1", interface="hsn9", quiet=True)
    said = whole(failed.value)  # whose last line is the list, not the doctor
    assert said.splitlines()[-1].startswith("interface='hsn9': this node has no such interface")
    assert {"lo"} <= set(said.rpartition("it has: ")[2].split(", "))


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        (["plan", "--script", "--batch", "slurm", "--nodes", "2"], "--gpus-per-node 4"),
        (["plan", "--script", "--batch", "slurm", "--job-extra-directives=--gres=gpu:2"], "--gpus-per-node 2"),
        # the number is not that of a node
        (["plan", "--script", "--batch", "slurm", "--job-extra-directives=--gpus-per-task=1"], "--gpus-per-node 4"),
        (
            ["plan", "--script", "--batch", "slurm", "--job-extra-directives=--tres-per-task=gres/gpu:1"],
            "--gpus-per-node 4",
        ),
        (["plan", "--script", "--batch", "slurm", "--gpus-per-node", "4", "--cores", "8"], "--cores-per-gpu 8"),
    ],
)
def test_command_speaks_of_options_and_its_advice_works(typed: list[str], advice: str, tmp_path: Path) -> None:
    done = ranks.in_process(*typed, cwd=tmp_path)
    assert done.returncode == 2
    assert advice in done.stderr
    assert not re.search(r"\bgpus_per_node=|\bcores_per_gpu=", done.stderr)
    kept = [word for word in typed if not word.startswith("--job-extra")]
    followed = ranks.in_process(*kept, *advice.split(), cwd=tmp_path)
    assert followed.returncode == 0, followed.stderr
    assert "#SBATCH" in followed.stdout
