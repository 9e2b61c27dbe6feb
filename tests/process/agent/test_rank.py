"""The rank program, whole: real ranks under a real MPI, a real scheduler, real workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import ranks
from waiting import scaled, until

from hpcgpu.host.addresses import local_address, usable_interfaces

WORLDS = pytest.mark.parametrize("count", [1, 2, 3, 6], ids=lambda n: f"{n}-ranks")
NAMES = "print(sorted(w['name'].rpartition('-')[2] for w in c.scheduler_info()['workers'].values()))"


@WORLDS
def test_any_number_of_ranks_gives_every_gpu_one_worker(tmp_path: Path, count: int) -> None:
    path = ranks.script(tmp_path, f"c = Client()\n{NAMES}\nprint(c.submit(sum, [1, 2, 3]).result(), sys.argv[1:])")
    done = ranks.run(path, "a b", "--gpus", ranks=count, options=("--gpus", "sim:4"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['0', '1', '2', '3']\n6 ['a b', '--gpus']\n"
    idle = f"; ranks without a worker: {count - 5}" if count > 5 else ""
    assert f"4 workers on 1 node ready{idle}; dashboard: cat " in done.stderr


@pytest.mark.parametrize(
    ("code", "expected"),
    [("sys.exit(3)", 3), ("raise ValueError", 1), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("pass", 0)],
)
def test_the_exit_code_is_the_scripts(tmp_path: Path, code: str, expected: int) -> None:
    assert ranks.run(ranks.script(tmp_path, code), ranks=3).returncode == expected


def test_a_busy_worker_does_not_hold_up_the_end(tmp_path: Path) -> None:
    code = """
        c = Client()
        running = sys.argv[1]
        os.mkfifo(running)
        f = c.submit(lambda: (open(running, "w").close(), time.sleep(600)))
        open(running).close()  # comes back when the task has opened it, too
        sys.exit(5)
    """
    done = ranks.run(ranks.script(tmp_path, code), str(tmp_path / "running"), ranks=3)
    assert done.returncode == 5, done.stderr


def test_a_dead_worker_is_back_and_the_clients_calls_work(tmp_path: Path) -> None:
    code = """
        import queue
        c, news = Client(), queue.Queue()
        # c.scheduler_info() may have none: the client renews it every 2 s without workers (distributed 2026.8.0)
        workers = lambda: c.sync(c.scheduler.identity, n_workers=-1)["workers"]
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


def test_all_processes_listen_on_the_chosen_interface(tmp_path: Path) -> None:
    if not (named := sorted(usable_interfaces() - {"lo"})):
        pytest.skip("this machine has loopback only")
    code = """
        c = Client()
        workers = c.scheduler_info()["workers"]
        on = [c.scheduler.address, *workers, *(w["nanny"] for w in workers.values())]
        print(sorted({address.rpartition(":")[0] for address in on}))
    """
    done = ranks.run(ranks.script(tmp_path, code), ranks=3, options=("--gpus", "sim:2", "--interface", named[0]))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"['tls://{local_address(named[0])}']\n"


@pytest.mark.parametrize(
    ("who", "codes"),
    [("c.run_on_scheduler(os.getpid)", {70}), ("os.getppid()", {70, 137})],
    ids=["scheduler", "leader"],
)
def test_a_dead_scheduler_or_leader_ends_everything(tmp_path: Path, who: str, codes: set[int]) -> None:
    # A killed leader ends as 137 and its followers, who notice, as 70: mpirun gives the code of the first that it sees.
    path = ranks.script(tmp_path, f"c = Client()\nos.kill({who}, signal.SIGKILL)\ntime.sleep(600)")
    done = ranks.run(path, ranks=3)
    assert done.returncode in codes, done.stderr
    assert left_of(path) == []


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_mpirun_leaves_nothing(tmp_path: Path, sig: signal.Signals) -> None:
    path = ranks.script(tmp_path, "c = Client()\nprint('up', flush=True)\ntime.sleep(600)")
    argv = ranks.command(path, options=("--gpus", "sim:2"), ranks=3)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ranks.environment(), text=True) as mpirun:
        assert mpirun.stdout.readline() == "up\n"
        mpirun.send_signal(sig)
        assert mpirun.wait(scaled(30)) != 0
    until(lambda: not left_of(path), "its ranks have ended", limit_s=15)  # with mpirun, which does not wait for them


def test_a_killed_mpirun_leaves_nothing(tmp_path: Path) -> None:
    path = ranks.script(tmp_path, "c = Client()\nprint('up', flush=True)\ntime.sleep(600)")
    argv = ranks.command(path, options=("--gpus", "sim:2"), ranks=3)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=ranks.environment(), text=True) as mpirun:
        assert mpirun.stdout.readline() == "up\n"
        family = psutil.Process(mpirun.pid).children(recursive=True)
        mpirun.kill()
        gone, alive = psutil.wait_procs(family, timeout=scaled(15))
    assert len(gone) > 5
    assert alive == []


def left_of(path: Path) -> list[list[str]]:
    """Return the command lines of processes that still run for a script."""
    commands = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                commands.append(process.cmdline())
        except psutil.Error:
            continue
    return [words for words in commands if any(str(path) in word for word in words)]


def test_each_rank_prints_what_its_worker_prints(tmp_path: Path) -> None:
    code = """
        c = Client()
        c.run(lambda: os.write(1, b"hello from a worker\\n"))
    """
    argv = ranks.command(ranks.script(tmp_path, code), options=("--gpus", "sim:2"), ranks=3)
    argv.insert(1, "--output")
    argv.insert(2, "tag")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=ranks.environment())
    speakers = re.findall(r"\[\d+,(\d+)\].*: hello from a worker", done.stdout)
    assert sorted(speakers) == ["1", "2"], done.stdout + done.stderr


def srun_env(rank: int, size: int, **more: str) -> dict[str, str]:
    """What srun --mpi=none gives its ranks."""
    facts = {"JOB_ID": "77", "STEP_ID": "0", "PROCID": str(rank), "STEP_NUM_TASKS": str(size), "LOCALID": str(rank)}
    return {f"SLURM_{k}": v for k, v in {**facts, "MPI_TYPE": "none", **more}.items()}


def test_worlds_of_one_are_told_apart_from_a_world(tmp_path: Path) -> None:
    path = ranks.script(tmp_path, "print('never')")
    first, second = (ranks.run(path, env=srun_env(r, 2)) for r in (0, 1))
    assert (first.returncode, first.stdout) == (1, "")
    assert "srun (--mpi=none) started 2 ranks, but MPI (Open MPI" in first.stderr
    assert "--rendezvous file" in first.stderr
    assert "Traceback" not in first.stderr
    assert (second.returncode, second.stderr) == (1, "")


def start_by_files(path: Path, home: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    argv = ranks.command(path, *arguments, options=("--gpus", "sim:2", "--rendezvous", "file"))
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    envs = [ranks.environment(HOME=str(home), **srun_env(rank, 3)) for rank in (2, 1, 0)]
    return [subprocess.Popen(argv, env=env, **pipe) for env in envs]


def test_ranks_meet_by_files_and_leave_none(tmp_path: Path) -> None:
    world = start_by_files(ranks.script(tmp_path, f"c = Client()\n{NAMES}"), tmp_path)
    said = [p.communicate(timeout=scaled(60)) for p in world]
    assert [p.returncode for p in world] == [0, 0, 0], said
    assert said[2][0] == "['0', '1']\n"
    assert list((tmp_path / ".hpcgpu" / "rendezvous").iterdir()) == []


def test_ranks_that_were_killed_meet_again_under_the_same_name(tmp_path: Path) -> None:
    """A launcher's name of a launch has its pid in it, and pids come again."""
    code = "pathlib.Path(sys.argv[1]).write_text(''); time.sleep(600 if sys.argv[1].endswith('first') else 0)"
    path = ranks.script(tmp_path, f"import pathlib\n{code}")
    first = start_by_files(path, tmp_path, str(tmp_path / "first"))
    until((tmp_path / "first").exists, "the first script runs")
    for process in first:
        process.kill()
    for process in first:
        process.communicate(timeout=scaled(60))
    assert next((tmp_path / ".hpcgpu/rendezvous").glob("*/world")).exists(), "what it left"
    second = start_by_files(path, tmp_path, str(tmp_path / "second"))
    said = [p.communicate(timeout=scaled(60)) for p in second]
    assert [p.returncode for p in second] == [0, 0, 0], said
    assert (tmp_path / "second").exists()
    assert list((tmp_path / ".hpcgpu/rendezvous").iterdir()) == []


def test_a_node_without_a_rank_is_an_error(tmp_path: Path) -> None:
    done = ranks.run(ranks.script(tmp_path, "pass"), env={"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
    assert done.returncode == 1
    assert "the job has 2 nodes, but ranks run on 1" in done.stderr


def test_what_fails_before_the_rendezvous_is_said_in_it(tmp_path: Path) -> None:
    done = ranks.run(
        ranks.script(tmp_path, "pass"), ranks=3, options=("--gpus", "sim:2", "--local-directory", "/dev/null")
    )
    assert done.returncode == 1
    assert done.stderr.count("cannot hold the files of a run") == 1, done.stderr


def test_scratch_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    code = """
        c = Client()
        print(*c.run(lambda dask_worker: dask_worker.local_directory).values())
        print(oct(os.stat(os.path.dirname(os.environ["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"])).st_mode & 0o777))
        import dask
        print(dask.config.get("temporary-directory"), *c.run(dask.config.get, "temporary-directory").values())
    """
    scratch = tmp_path / "scratch"
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:2", "--local-directory", str(scratch)))
    first, second, third = done.stdout.splitlines()
    assert all(folder.startswith(f"{scratch}{os.sep}hpcgpu-run-") for folder in (*first.split(), *third.split()))
    assert len(third.split()) == 3
    assert second == "0o700"
    assert list(scratch.iterdir()) == []


def test_the_script_sees_the_users_environment(tmp_path: Path) -> None:
    code = "print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('PYTHONHASHSEED'), os.environ.get('MINE'))"
    clean = ranks.run(ranks.script(tmp_path, code), env={"MINE": "1"})
    assert clean.stdout == f"{os.environ.get('OMP_NUM_THREADS')} {os.environ.get('PYTHONHASHSEED')} 1\n"


def test_a_long_tmpdir_is_as_good_as_a_short_one(tmp_path: Path) -> None:
    """A unix socket's name has 107 bytes at most."""
    folder = tmp_path / ("t" * 150)
    folder.mkdir()
    path = ranks.script(tmp_path, f"c = Client()\n{NAMES}")
    done = ranks.run(path, ranks=3, env={"TMPDIR": str(folder)})
    assert (done.returncode, done.stdout) == (0, "['0', '1']\n"), done.stderr
    assert list(folder.glob("hpcgpu-*")) == []
