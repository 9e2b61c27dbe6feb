"""A run that the machine refuses, or that has no worker left, ends with the reason."""

import os
import re
from pathlib import Path

import pytest
import ranks
from distributed import Client, LocalCluster
from shared_host import NEIGHBOUR
from waiting import scaled, until

from hpcgpu import JobError, LocalGPUCluster

# Ends the nanny of each worker, as distributed does with one that it cannot start again.
DIES = """
    def die(dask_worker):
        import asyncio
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(dask_worker.close(reason="broken")))

    with Client() as client:
        client.run(die, nanny=True)
        client.submit(sum, [1], key="late").result()
        time.sleep(600)
"""
LEAVE = """
    with Client() as client:
        client.retire_workers(list(client.scheduler_info()["workers"]))
        print("without workers")
        client.submit(sum, [1]).result()
"""
# It waits for none of its futures, so that it does not end by their errors.
FILL = """
    with Client() as c:
        blocks = c.map(lambda i: os.urandom(30_000_000), range(40), pure=False)
        time.sleep(600)
"""
# As the kernel refuses under 'ulimit -u', which does not count for root.
REFUSING = """
import _thread, os, threading, traceback

start = getattr(_thread, "start_joinable_thread", _thread.start_new_thread)  # since Python 3.13
fork, left = os.fork, [int(os.environ.get("FORKS", 1000))]

def refusing_fork():
    left[0] -= 1
    if left[0] < 0:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

def refusing_thread(*call, **options):
    if any(os.environ["NO_THREADS"] in frame.filename for frame in traceback.extract_stack()):
        raise RuntimeError("can't start new thread")
    return start(*call, **options)

os.fork = refusing_fork
if "NO_THREADS" in os.environ:
    _thread.start_new_thread = threading._start_new_thread = refusing_thread
    _thread.start_joinable_thread = threading._start_joinable_thread = refusing_thread
"""
# Dask imports a preload twice in each worker.
ONE_LICENCE = 'import os\n"LICENCE" in os.environ or os.environ.update(LICENCE=open({path!r}, "x").name)\n'
SCRIPT = """
from distributed import Client
def found():
    import importlib.util
    return importlib.util.find_spec("mine") is not None
with Client() as client:
    print("worker found:", client.submit(found).result())
"""


def test_workers_that_died_for_good_end_the_run(tmp_path: Path) -> None:
    done = ranks.run(ranks.script(tmp_path, DIES), options=("--gpus", "sim:1"))
    assert done.returncode == 1
    assert "the run ends: no worker is left, and none comes: worker " in done.stderr
    assert ": broken\n" in done.stderr


@pytest.mark.parametrize(
    ("door", "licence", "words"),
    [
        ("run", "one", "1 of 2 workers on 1 node ready; "),
        ("run", "none/one", "no worker of this node could be started: "),
        ("launch", "one", "1 of 2 workers on 1 node ready; "),
        ("worker", "one", "1 of 2 workers could not be started: "),
    ],
)
def test_each_door_names_a_worker_that_does_not_start(tmp_path: Path, door: str, licence: str, words: str) -> None:
    env = {"DASK_DISTRIBUTED__WORKER__PRELOAD": repr([ONE_LICENCE.format(path=str(tmp_path / licence))])}
    env |= {"SLURM_JOB_ID": "7"} if door == "launch" else {}
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster:
        what = cluster.scheduler_address if door == "worker" else str(ranks.script(tmp_path, SCRIPT))
        done = ranks.run_command([str(ranks.BIN / "hpcgpu"), door, "--gpus", "sim:2x16MiB", what], env)
    assert done.returncode == ("ready" not in words), done.stderr
    assert re.search(rf"{words}the worker \S+-\d did not start: File\w+Error.*/one'", done.stderr), done.stderr


def test_tasks_fail_after_a_script_retires_all_workers(tmp_path: Path) -> None:
    """The script ends by the error, so that what Python has in a buffer is written."""
    options = ("--gpus", "sim:1", "--death-timeout", "4")
    done = ranks.run(ranks.script(tmp_path, LEAVE), options=options, env={"PYTHONUNBUFFERED": ""})
    assert (done.returncode, done.stdout) == (1, "without workers\n"), done.stderr
    assert "hpcgpu.errors.JobError: no worker is left" in done.stderr
    assert "all workers have been retired; the script goes on without workers" in done.stderr
    assert "the run ends: no worker is left, and none comes" in done.stderr


def test_a_cluster_without_workers_is_lost_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.use_environment(monkeypatch)
    with LocalGPUCluster(gpus="sim:1", log_directory=str(tmp_path)) as cluster, Client(cluster) as client:
        client.retire_workers(list(client.scheduler_info()["workers"]))
        until(lambda: "is lost" in repr(cluster) or "lost" in repr(cluster), "the end is known")
        with pytest.raises(JobError, match=r"the job ends: all its workers have been retired"):
            cluster.wait_for_workers(1)


def test_all_workers_pause_and_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    inside = ranks.unshared("--mount")
    (tmp_path / "small").mkdir()
    prepare = f'mount -t tmpfs -o size=40M none {tmp_path}/small && exec "$@"'
    options = ["--gpus", "sim:1", "--memory-limit", "450MB", "--death-timeout", "12"]
    options += ["--local-directory", f"{tmp_path}/small"]
    argv = [*inside, "bash", "-c", prepare, "job", *ranks.command(ranks.script(tmp_path, FILL), options=options)]
    done = ranks.run_command(argv, timeout=scaled(120))
    assert done.returncode == 1, done.stderr
    assert "all workers have paused for 12 s, because their memory is full" in done.stderr
    assert "No space left on device" in done.stderr
    assert "hpcgpu: the run ends: all workers have paused\n" in done.stderr


@pytest.mark.parametrize(
    "refused",
    [{"FORKS": "0"}, {"FORKS": "1"}, {"FORKS": "2"}, {"NO_THREADS": ""}, {"NO_THREADS": "/processes/worker.py"}],
    ids=["leader", "fork-server-scheduler", "fork-server-worker", "threads", "threads-worker"],
)
def test_refused_process_or_thread_is_an_error(tmp_path: Path, refused: dict[str, str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSING)
    path = ranks.script(tmp_path, "print('never')")
    done = ranks.run(path, env={"PYTHONPATH": str(tmp_path), **refused})
    assert done.returncode == 1, done.stderr
    assert "no further process or thread can be started on" in done.stderr
    assert "(ulimit -u)" in done.stderr
    assert ("Traceback" in done.stderr, done.stdout) == (False, "")


def test_rank_0_refuses_workers_for_which_it_has_too_few_files(tmp_path: Path) -> None:
    argv = ranks.command(ranks.script(tmp_path, "print('never')"), options=("--gpus", "sim:50x16MiB"))
    done = ranks.run_command(["bash", "-c", 'ulimit -n 110; exec "$@"', "job", *argv])
    assert (done.returncode, done.stdout) == (1, "")
    text = r"50 workers need \d+ open files of the scheduler; the hard limit \(ulimit -Hn\) is 110 on .* administrators"
    assert re.search(text, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_a_loopback_without_ipv4(tmp_path: Path) -> None:
    inside = ranks.unshared("--net")
    prepare = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo; exec "$@"'
    command = ranks.command(ranks.script(tmp_path, "print('never')"), options=("--gpus", "sim:1"))
    done = ranks.run_command([*inside, "bash", "-c", prepare, "job", *command])
    assert done.returncode == 1, done.stderr
    assert "this node's loopback has no address 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("mode", [0o1777, 0o2770])
def test_modules_of_a_shared_folder_are_not_imported(tmp_path: Path, mode: int) -> None:
    """Those of the user's own folder are, by workers too; and of a shared one whose users are trusted."""
    if mode == 0o2770 and os.getuid():
        pytest.skip("a group with other users can be played by root only")
    shared, own, scripts = (tmp_path / name for name in ("shared", "own", "scripts"))
    for folder in (shared, own, scripts):
        folder.mkdir()
    if mode == 0o2770:
        os.chown(shared, -1, NEIGHBOUR)
    shared.chmod(mode)
    (own / "mine.py").touch()
    (scripts / "script.py").write_text(SCRIPT)
    for name in ("dask", "distributed", "numpy", "msgspec", "hpcgpu", "cupy", "snappy", "lz4", "mine"):
        (shared / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')")
    argv = ranks.command(scripts / "script.py", options=("--gpus", "sim:1", "--no-dashboard"))
    for folder in (shared, own):
        done = ranks.run_command(["env", f"--chdir={folder}", *argv])
        assert f"worker found: {folder is own}" in done.stdout, done.stderr
        assert (f"modules in {folder} are not imported: every" in done.stderr) == (folder is shared), done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    (trusted,) = re.findall("export (PYTHONPATH=.*)", ranks.run_command(["env", f"--chdir={shared}", *argv]).stderr)
    for name in ("dask", "distributed", "numpy", "msgspec", "hpcgpu", "cupy", "snappy", "lz4"):
        (shared / f"{name}.py").unlink()
    assert "worker found: True" in ranks.run_command(["env", f"--chdir={shared}", trusted, *argv]).stdout
