"""A run leaves no file, however it ends: what is there before and after is compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ranks
from leaks import signal_all
from shared_host import Place, shared_host
from waiting import scaled

pytestmark = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can give a run a /dev/shm of its own, to compare that, too"
)

# What all have, and a process that is killed may need to be gone.
_GONE_S = 20.0
# The end of a script: says who is who, and goes on until it is told.
STAY = """
        scheduler, workers = c.run_on_scheduler(os.getpid), list(c.run(os.getpid).values())
        server = psutil.Process(scheduler).parent()
        who = dict(scheduler=scheduler, worker=workers[0], fork_server=server.pid, leader=server.ppid())
        who["script"] = os.getpid()
        print(json.dumps(who), flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.05)
"""
SCRIPT = f"""
    import json, psutil
    with Client() as c:{STAY}"""
CLUSTER = f"""
    import json, psutil
    from hpcgpu import LocalGPUCluster
    if __name__ == "__main__":
      with LocalGPUCluster(**json.loads(sys.argv[2])) as cluster, Client(cluster) as c:{STAY}"""
OPTIONS = ("--gpus", "sim:2")


@pytest.fixture
def place() -> Iterator[Place]:
    with shared_host() as made:
        yield made


def left(place: Place) -> list[str]:
    """Return what lies in the folders, without those that stay, empty."""
    stay = {place.home / ".hpcgpu" / name for name in ("", "runs", "launches", "rendezvous")}
    paths = [path for folder in (*place.shared, place.home) for path in folder.rglob("*")]
    return [str(path) for path in paths if path not in stay]


def removers(place: Place) -> list[psutil.Process]:
    """Return the processes that wait for the end of a run in these folders."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if any(word.endswith("host/remover.py") for word in words) and str(place.tmp.parent) in words[-1]:
            found.append(process)
    return found


def await_(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + _GONE_S
    while not condition():
        assert time.monotonic() < end, f"within {_GONE_S:g} s not: {what}"
        time.sleep(0.05)


def run(place: Place, argv: list[str], go_on: Path, victim: str, sig: signal.Signals) -> None:
    """Start a run, hit one of its processes, or all of a kind, and wait for its end."""
    with place.start(argv, stderr=subprocess.DEVNULL) as process:
        who = {name: [pid] for name, pid in json.loads(process.stdout.readline()).items()}
        family = psutil.Process(process.pid).children(recursive=True)
        waiting = removers(place)
        assert waiting
        assert any(name.name.startswith("hpcgpu-run-") for name in (*place.tmp.iterdir(), *place.spill.iterdir()))
        who |= {
            "first": [process.pid],
            "mpirun": [p.pid for p in family if p.name() == "prterun"],
            "follower": [p.pid for p in family if p.ppid() == process.pid and [p.pid] != who["leader"]],
            "remover": [p.pid for p in waiting],
        }
        for kind in victim.split():
            assert who[kind]
            signal_all(who[kind], sig)
        go_on.touch()
        process.wait(scaled(60))
    await_("all processes have ended", lambda: not any(map(psutil.Process.is_running, [*family, *waiting])))


@pytest.mark.parametrize(
    ("victim", "sig"),
    [
        ("", signal.SIGKILL),
        ("first", signal.SIGTERM),
        ("first", signal.SIGINT),
        ("first", signal.SIGHUP),
        ("first", signal.SIGKILL),
        ("leader", signal.SIGKILL),
        ("follower", signal.SIGKILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value or "nobody",
)
def test_nothing_is_left_of_ranks_of_mpirun(place: Place, tmp_path: Path, victim: str, sig: signal.Signals) -> None:
    argv = ranks.command(ranks.script(tmp_path, SCRIPT), str(tmp_path / "go on"), options=OPTIONS, ranks=3)
    run(place, argv, tmp_path / "go on", victim, sig)
    own = str(place.tmp / "ompi.")  # a killed mpirun's
    assert [path for path in left(place) if not (victim == "first" and path.startswith(own))] == []


@pytest.mark.parametrize("victim", ["", "leader", "fork_server", "scheduler", "worker", "script", "remover"])
def test_nothing_is_left_of_a_run(place: Place, tmp_path: Path, victim: str) -> None:
    options = (*OPTIONS, "--local-directory", str(place.spill))
    argv = ranks.command(ranks.script(tmp_path, SCRIPT), str(tmp_path / "go on"), options=options)
    run(place, argv, tmp_path / "go on", victim, signal.SIGKILL)
    assert left(place) == []


@pytest.mark.parametrize("victim", ["", "first", "mpirun", "leader"])
def test_nothing_is_left_of_a_launch(place: Place, tmp_path: Path, victim: str) -> None:
    path = ranks.script(tmp_path, SCRIPT)
    argv = [str(ranks.BIN / "hpcgpu"), "launch", "--launcher", "mpirun", *OPTIONS, str(path), str(tmp_path / "go on")]
    run(place, argv, tmp_path / "go on", victim, signal.SIGKILL)
    assert left(place) == []


@pytest.mark.parametrize(
    ("launcher", "victim", "sig"),
    [
        ("fork", "", signal.SIGKILL),
        ("fork", "first", signal.SIGTERM),
        ("fork", "first", signal.SIGKILL),
        ("fork", "leader", signal.SIGKILL),
        ("mpirun", "first", signal.SIGKILL),
        ("mpirun", "mpirun", signal.SIGKILL),
    ],
)
def test_nothing_is_left_of_a_cluster_of_this_machine(
    place: Place, tmp_path: Path, launcher: str, victim: str, sig: signal.Signals
) -> None:
    given = json.dumps({"gpus": "sim:2", "launcher": launcher, "local_directory": str(place.spill)})
    argv = [sys.executable, str(ranks.script(tmp_path, CLUSTER)), str(tmp_path / "go on"), given]
    run(place, argv, tmp_path / "go on", victim, sig)
    assert left(place) == []


@pytest.mark.parametrize("later", ["ps", "run"])
def test_what_is_left_all_the_same_goes_later(place: Place, tmp_path: Path, later: str) -> None:
    argv = [sys.executable, str(ranks.script(tmp_path, CLUSTER)), str(tmp_path / "go on"), '{"gpus": "sim:2"}']
    run(place, argv, tmp_path / "go on", "remover first", signal.SIGKILL)
    (path,) = place.tmp.iterdir()
    assert path.name.startswith("hpcgpu-client-")
    words = ["run", *OPTIONS, str(ranks.script(tmp_path, "Client()"))] if later == "run" else [later]
    code, _, wrong = place.run([str(ranks.BIN / "hpcgpu"), *words])
    assert code == 0, wrong
    assert left(place) == []
