"""CPU seconds per worker from launch to 8 workers registered, and seconds until a killed worker is back.

Beside us: ``dask scheduler`` with ``dask worker --nworkers 8``, and dask-mpi with nannies, both as installed
by default. One JSON line per figure; the median of ``--runs`` runs, all cases in turn in each run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import _figures
from _trees import Cost, Tree

BIN = Path(sys.executable).parent
WORKERS = 8
report = functools.partial(_figures.report, "startup")
MPIRUN = [str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(WORKERS + 1)]
MANY, ONE = f"{WORKERS} workers, 1 + {WORKERS} ranks", f"{WORKERS} workers, one rank"
BY_FILES = ("--launcher", "mpirun", "--rendezvous", "file")
REGISTERED = b"Register worker addr"
WAIT = "import time; time.sleep(600)\n"
RESTART = """
import os, signal, sys, time
from distributed import Client, LocalCluster
if __name__ == "__main__":
    two = dict(n_workers=2, threads_per_worker=1, dashboard_address=None)
    cluster = LocalCluster(**two) if sys.argv[1] == "nanny" else None
    client = Client(cluster) if cluster else Client()
    client.wait_for_workers(2)
    pids = client.run(os.getpid)
    victim = sorted(pids)[0]
    start = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    there = lambda dask_scheduler: list(dask_scheduler.workers)
    while victim in (now := client.run_on_scheduler(there)) or len(now) < 2:
        time.sleep(0.002)
    print("restart_s", time.monotonic() - start, flush=True)
    client.close()
    if cluster:
        cluster.close()
"""


def environment(**more: str) -> dict[str, str]:
    """Return what the programs start with: like the peers, which pip compiled, we are compiled once, not each time."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **root, **more}


@contextmanager
def tree() -> Iterator[Tree]:
    t = Tree()
    try:
        yield t
    finally:
        t.end()


def ours(command: str, *options: str) -> Cost:
    """``hpcgpu launch`` or ``run``, as users type it, TLS and dashboard as by default."""
    with tree() as t, tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(WAIT)
        gpus = ["--gpus", f"sim:{WORKERS}x16MiB"]
        t.start([str(BIN / "hpcgpu"), command, *gpus, *options, str(script)], environment())
        return t.wait_for(b"workers on 1 node ready", 1)


def dask_worker(*options: str, **more: str) -> Cost:
    with tree() as t, tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/scheduler.json"
        env = environment(**more)
        scheduler = ["--no-dashboard"] if "--no-dashboard" in options else []
        t.start([str(BIN / "dask"), "scheduler", "--port", "0", "--scheduler-file", file, *scheduler], env)
        workers = [str(BIN / "dask"), "worker", "--scheduler-file", file, "--nworkers", str(WORKERS), "--nthreads", "1"]
        t.start([*workers, "--local-directory", folder, *options], env)
        return t.wait_for(REGISTERED, WORKERS)


def dask_mpi(*options: str) -> Cost:
    with tree() as t, tempfile.TemporaryDirectory() as folder:
        run = [str(BIN / "dask-mpi"), "--scheduler-file", f"{folder}/scheduler.json", "--nthreads", "1"]
        t.start([*MPIRUN, *run, "--local-directory", folder, *options], environment())
        return t.wait_for(REGISTERED, WORKERS)


CASES: list[tuple[str, str, Callable[[], Cost]]] = [
    (MANY, "hpcgpu", lambda: ours("launch", "--launcher", "mpirun")),
    (MANY, "hpcgpu without TLS", lambda: ours("launch", "--launcher", "mpirun", "--no-security")),
    (MANY, "hpcgpu without TLS and MPI", lambda: ours("launch", *BY_FILES, "--no-security")),
    (ONE, "hpcgpu", lambda: ours("run")),
    (ONE, "hpcgpu without TLS", lambda: ours("run", "--no-security")),
    (MANY, "dask worker nanny", dask_worker),
    (MANY, "dask-mpi Nanny", lambda: dask_mpi("--worker-class", "distributed.Nanny")),
    (MANY, "dask worker nanny, no dashboard", lambda: dask_worker("--no-dashboard")),
    (MANY, "dask worker nanny, fork", lambda: dask_worker(DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD="fork")),
    (MANY, "dask-mpi Worker (no nanny)", lambda: dask_mpi("--worker-class", "distributed.Worker")),
]


def restart(who: str) -> float:
    """Seconds from SIGKILL of a worker until another has registered in its place."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(RESTART)
        run = [str(BIN / "hpcgpu"), "run", "--gpus", "sim:2x16MiB"] if who == "hpcgpu" else [sys.executable]
        argv = [*run, str(script), who]
        said = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=True, timeout=120).stdout
    return float(said.split("restart_s")[1])


def imported() -> float:
    """Milliseconds of ``import hpcgpu``, Python's own start left out."""
    code = "import time; s = time.perf_counter(); import hpcgpu; print((time.perf_counter() - s) * 1000)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def lookups(ranks: str) -> tuple[float, float]:
    """Look-ups of names in the Python environment per GPU, as strace counts them: all, and those that each node makes.

    A job makes the others once: hpcgpu launch, the launcher, and the start of Python for the script.
    """
    homes = {str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text("import os; os._exit(0)\n")
        trace = ["strace", "-ff", "-e", "trace=%file", "-o", f"{folder}/trace"]
        launch = [
            str(BIN / "hpcgpu"),
            "launch",
            "--gpus",
            f"sim:{WORKERS}x16MiB",
            "--launcher",
            "mpirun",
            "--ranks",
            ranks,
        ]
        argv = [*trace, *launch, f"{folder}/script.py"]
        subprocess.run(argv, env=environment(), capture_output=True, check=True, timeout=600)
        everything = of_nodes = 0
        for file in Path(folder).glob("trace.*"):
            lines = file.read_text(errors="replace").splitlines()
            count = sum(any(home in line for home in homes) for line in lines)
            program = next((line for line in reversed(lines) if line.startswith("execve(")), "")
            everything += count
            # a rank with all that it forks, and the remover of its folder
            of_nodes += count if not program or "hpcgpu.agent" in program or "/hpcgpu-run-" in program else 0
        return everything / WORKERS, of_nodes / WORKERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    costs: dict[tuple[str, str], list[Cost]] = {(case, who): [] for case, who, _ in CASES}
    restarts: dict[str, list[float]] = {"hpcgpu": [], "nanny": []}
    for _ in range(runs):
        for case, who, start in CASES:
            costs[case, who].append(start())
        for who, values in restarts.items():
            values.append(restart(who))
    for (case, who), found in costs.items():
        report(case, who, "cpu_s_per_worker", [c.cpu_s / WORKERS for c in found], "s")
        report(case, who, "wall_s", [c.wall_s for c in found], "s")
        report(case, who, "uss_mib", [c.uss_mib for c in found], "MiB")
    for who, values in restarts.items():
        report("2 workers", who, "restart_s", values, "s")
    for ranks in ("gpu", "node"):
        case = f"{WORKERS} workers on a node, a rank per {ranks}"
        if shutil.which("strace"):
            everything, of_nodes = lookups(ranks)
            report(case, "hpcgpu", "lookups_per_gpu", [everything], "")
            report(f"{case}, without what a job does once", "hpcgpu", "lookups_per_gpu", [of_nodes], "")
        else:
            print(json.dumps(_figures.missing("startup", case, "hpcgpu", "lookups_per_gpu", "no strace here", "")))
    report("import", "hpcgpu", "import_ms", [imported() for _ in range(runs)], "ms")


if __name__ == "__main__":
    main()
