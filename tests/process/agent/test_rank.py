"""The rank program, whole: real ranks under a real MPI, a real scheduler, real workers."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import ranks
from waiting import scaled, until

from hpcgpu.host import process
from hpcgpu.host.addresses import local_address, usable_interfaces

NAMES = "print(sorted(w['name'].rpartition('-')[2] for w in c.scheduler_info()['workers'].values()))"
BUSY = """
    c = Client()
    running = sys.argv[1]
    os.mkfifo(running)
    f = c.submit(lambda: (open(running, "w").close(), time.sleep(600)))
    open(running).close()  # comes back when the task has opened it, too
    raise ValueError
"""


@pytest.mark.parametrize("count", [1, 3, 6], ids=lambda n: f"{n}-ranks")
def test_any_number_of_ranks_gives_every_gpu_one_worker(tmp_path: Path, count: int) -> None:
    """With a long TMPDIR, too: the name of a unix socket has 107 bytes at most."""
    folder = tmp_path / ("t" * 150)
    folder.mkdir()
    path = ranks.script(tmp_path, f"c = Client()\n{NAMES}\nprint(c.submit(sum, [1, 2, 3]).result(), sys.argv[1:])")
    env = {"TMPDIR": str(folder)} if count > 2 else None
    done = ranks.run(path, "a b", "--gpus", ranks=count, options=("--gpus", "sim:4"), env=env)
    assert list(folder.glob("hpcgpu-*")) == []
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['0', '1', '2', '3']\n6 ['a b', '--gpus']\n"
    idle = f"; ranks without a worker: {count - 5}" if count > 5 else ""
    assert f"4 workers on 1 node ready{idle}; dashboard: its address is in " in done.stderr


def test_a_busy_worker_does_not_hold_up_the_scripts_end(tmp_path: Path) -> None:
    """``launch/test_launch_end.py`` has the other exit codes."""
    done = ranks.run(ranks.script(tmp_path, BUSY), str(tmp_path / "running"), ranks=3)
    assert done.returncode == 1, done.stderr


def test_a_dead_worker_is_back_and_the_clients_calls_work(tmp_path: Path) -> None:
    code = """
        import queue
        c, news = Client(), queue.Queue()
        workers = lambda: c.scheduler_info()["workers"]
        c.subscribe_topic("all", lambda event: news.put(event[1]["action"]))
        c.submit(sum, []).result()  # then the scheduler knows that
        pids = c.run(os.getpid)
        os.kill(pids[sorted(pids)[0]], signal.SIGKILL)
        while news.get() != "remove-worker":
            continue
        while news.get() != "add-worker":
            continue
        c.restart()
        c.wait_for_workers(2)
        name = next(w["name"] for w in workers().values())
        print(list(c.restart_workers([name]).values()))
        print(len(set(c.run(os.getpid, nanny=True).values())))
        c.retire_workers(list(workers())[:1])
        print(len(workers()))
    """
    done = ranks.run(ranks.script(tmp_path, code), ranks=3)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['OK']\n1\n1\n"  # both nannies live in the leader


def start_by_files(path: Path, argument: Path) -> list[subprocess.Popen[str]]:
    """Start three ranks as srun --mpi=none does."""
    argv = ranks.command(path, str(argument), options=("--gpus", "sim:2", "--rendezvous", "file"))
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_MPI_TYPE": "none"}
    envs = [ranks.environment(**job, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "210"]
    return [subprocess.Popen(argv, env=env, **pipe) for env in envs]


def test_ranks_that_were_killed_meet_again_under_the_same_name(tmp_path: Path) -> None:
    """By files, of which none is left: a launcher's name of a launch has its pid in it, and pids come again."""
    code = "open(sys.argv[1], 'w').close(); time.sleep(600 if sys.argv[1].endswith('first') else 0)"
    path = ranks.script(tmp_path, f"{code}\nc = Client()\n{NAMES}")
    first = start_by_files(path, tmp_path / "first")
    until((tmp_path / "first").exists, "the first script runs")
    for rank in first:
        rank.kill()
    for rank in first:
        rank.communicate(timeout=scaled(60))
    assert next((tmp_path / ".hpcgpu/rendezvous").glob("*/world-*")).exists(), "what it left"
    second = start_by_files(path, tmp_path / "second")
    said = [p.communicate(timeout=scaled(60)) for p in second]
    assert [p.returncode for p in second] == [0, 0, 0], said
    assert said[2][0] == "['0', '1']\n"
    assert list((tmp_path / ".hpcgpu/rendezvous").iterdir()) == []


def test_an_error_before_the_rendezvous_is_printed_once(tmp_path: Path) -> None:
    options = ("--gpus", "sim:2", "--local-directory", "/dev/null")
    done = ranks.run(ranks.script(tmp_path, "pass"), ranks=3, options=options)
    assert done.returncode == 1
    assert done.stderr.count("cannot hold the files of a run") == 1, done.stderr


def test_a_run_has_its_interface_scratch_and_environment(tmp_path: Path) -> None:
    code = """
        c = Client()
        print(*c.run(lambda dask_worker: dask_worker.local_directory).values())
        print(oct(os.stat(os.path.dirname(os.environ["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"])).st_mode & 0o777))
        import dask
        print(dask.config.get("temporary-directory"), *c.run(dask.config.get, "temporary-directory").values())
        print(*map(os.environ.get, ("OMP_NUM_THREADS", "PYTHONHASHSEED", "MINE")))
        workers = c.scheduler_info()["workers"]
        on = [c.scheduler.address, *workers, *(w["nanny"] for w in workers.values())]
        sockets = c.connection_args["ssl_context"].sslsocket_class.__name__
        print(*{address.rpartition(":")[0] for address in on}, sockets)
    """
    scratch = tmp_path / "scratch"
    interface = min(usable_interfaces() - {"lo"}, default="lo")
    options = ("--gpus", "sim:2", "--local-directory", str(scratch), "--interface", interface)
    done = ranks.run(ranks.script(tmp_path, code), ranks=3, options=options, env={"MINE": "1"})
    assert done.returncode == 0, done.stderr
    workers, mode, temporary, variables, listening = done.stdout.splitlines()
    folders = (*workers.split(), *temporary.split())
    assert len(folders) == 5
    assert all(folder.startswith(f"{scratch}{os.sep}hpcgpu-run-") for folder in folders)
    assert mode == "0o700"
    assert list(scratch.iterdir()) == []
    assert variables == f"{os.environ.get('OMP_NUM_THREADS')} {os.environ.get('PYTHONHASHSEED')} 1"
    assert listening == f"tls://{local_address(interface)} TlsSocket"


@pytest.mark.parametrize(
    ("away", "fact", "who", "flags"),
    [('kill -STOP "$$"; exit 0', "is stopped", 2, ("--continuous",)), ("exec sleep 600", "has not come so far", 0, ())],
    ids=["stopped", "asleep"],
)
def test_mpi_without_all_ranks_names_the_missing_ones(
    tmp_path: Path, away: str, fact: str, who: int, flags: tuple[str, ...]
) -> None:
    (tmp_path / "tmp").mkdir()
    rank = ranks.command(ranks.script(tmp_path, ""), options=("--gpus", "sim:2", "--death-timeout", "6"))
    keep = f'if [ "$OMPI_COMM_WORLD_RANK" = {who} ]; then echo "$$" > {tmp_path}/pid; {away}; fi; exec "$@"'
    argv = [*ranks.MPIRUN, *flags, "-n", "3", "bash", "-c", keep, "bash", *rank]
    done = ranks.run_command(argv, {"TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path)}, scaled(60))
    pid, host = int((tmp_path / "pid").read_text()), os.uname().nodename
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("hpcgpu:")]
    assert said.startswith("hpcgpu: not all 3 ranks came to the rendezvous within 6 s (--death-timeout). Missing: ")
    assert f"rank {who} on {host} (process {pid} {fact})" in said
    assert re.search(rf"\. There: ranks? \S+ on {host}$", said)
    # both a moment after mpirun's SIGKILL
    until(lambda: not process.start_time(pid), "the rank is gone", limit_s=20)
    until(lambda: not list((tmp_path / "tmp").glob("hpcgpu-*")), "the run's folder is gone")
    assert not (tmp_path / ".hpcgpu").exists()
