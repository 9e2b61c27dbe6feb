"""A run leaves no file, however it ends: what is there before and after is compared."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ranks
from leaks import signal_all
from shared_host import Place, shared_place
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


place = shared_place
TERM, KILL = signal.SIGTERM, signal.SIGKILL
WAYS = {
    "mpirun": [("first", TERM), *((who, KILL) for who in ("first", "follower", "scheduler", "leader"))],
    "run": [(who, KILL) for who in ("leader", "fork_server", "scheduler", "worker", "script", "remover")],
    "launch": [("first", KILL), ("mpirun", KILL)],
    "LocalGPUCluster": [("first", TERM), ("first", KILL)],
    "LocalGPUCluster by mpirun": [("first", KILL)],
}


def left(place: Place) -> list[str]:
    """Return what lies in the folders, without those that stay, empty."""
    stay = {place.home / ".hpcgpu" / name for name in ("", "runs", "launches", "rendezvous")}
    paths = [path for folder in (*place.shared, place.home) for path in folder.rglob("*")]
    return [str(path) for path in paths if path not in stay]


def run(place: Place, argv: list[str], go_on: Path, victim: str, sig: signal.Signals) -> int:
    """Start a run, hit one of its processes, or all of a kind, wait for its end, and return its exit code."""
    with place.start(argv, stderr=subprocess.DEVNULL) as process:
        who = {name: [pid] for name, pid in json.loads(process.stdout.readline()).items()}
        family = psutil.Process(process.pid).children(recursive=True)
        lines = [(p, p.info["cmdline"] or [""]) for p in psutil.process_iter(["cmdline"])]
        here = str(place.tmp.parent)
        waiting = [p for p, words in lines if "host/remover.py" in " ".join(words) and here in words[-1]]
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
        if victim not in ("scheduler", "leader"):  # these end a run whose script goes on
            go_on.touch()
        code = process.wait(scaled(60))
    assert psutil.wait_procs([*family, *waiting], timeout=_GONE_S)[1] == []
    return code


@pytest.mark.parametrize(("way", "victim", "sig"), [(way, *hit) for way, hits in WAYS.items() for hit in hits])
def test_nothing_is_left_of_a_run(place: Place, tmp_path: Path, way: str, victim: str, sig: signal.Signals) -> None:
    go_on, path = tmp_path / "go on", ranks.script(tmp_path, CLUSTER if "Local" in way else SCRIPT)
    options = (*OPTIONS, "--local-directory", str(place.spill)) if way == "run" else OPTIONS
    if way == "launch":
        argv = [str(ranks.BIN / "hpcgpu"), "launch", "--launcher", "mpirun", *options, str(path), str(go_on)]
    elif "Local" in way:
        launcher = "mpirun" if "mpirun" in way else "fork"
        given = {"gpus": "sim:2", "launcher": launcher, "local_directory": str(place.spill)}
        argv = [sys.executable, str(path), str(go_on), json.dumps(given)]
    else:
        argv = ranks.command(path, str(go_on), options=options, ranks=3 if way == "mpirun" else 1)
    code = run(place, argv, go_on, victim, sig)
    # A killed leader's followers end as 70: mpirun gives the code of the first that it sees.
    codes = {"scheduler": {70}, "leader": {70, 137, -KILL}}
    assert code in codes[victim] if victim in codes else code or way != "mpirun"
    own = str(place.tmp / "ompi.")  # the folder of an mpirun of the user's, who has killed it
    assert [name for name in left(place) if not ((way, victim) == ("mpirun", "first") and name.startswith(own))] == []


@pytest.mark.parametrize("later", ["ps", "run"])
def test_folders_left_after_all_are_removed_later(place: Place, tmp_path: Path, later: str) -> None:
    argv = [sys.executable, str(ranks.script(tmp_path, CLUSTER)), str(tmp_path / "go on"), '{"gpus": "sim:2"}']
    run(place, argv, tmp_path / "go on", "remover first", signal.SIGKILL)
    (path,) = place.tmp.iterdir()
    assert path.name.startswith("hpcgpu-client-")
    words = ["run", *OPTIONS, str(ranks.script(tmp_path, "Client()"))] if later == "run" else [later]
    code, _, wrong = place.run([str(ranks.BIN / "hpcgpu"), *words])
    assert code == 0, wrong
    assert left(place) == []
