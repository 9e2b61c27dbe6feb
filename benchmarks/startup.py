"""CPU seconds per worker from launch to 8 workers registered, and seconds until a killed worker is back.

Beside us: ``dask scheduler`` with ``dask worker --nworkers 8``, and dask-mpi with nannies, both as installed
by default. One JSON line per figure; the median of ``--runs`` runs, all cases in turn in each run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import _figures
from _trees import Cost, Tree

import hpcgpu

BIN = Path(sys.executable).parent
WORKERS = 8
report = functools.partial(_figures.report, "startup")
MPIRUN = [str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(WORKERS + 1)]
MANY, ONE = f"{WORKERS} workers, 1 + {WORKERS} ranks", f"{WORKERS} workers, one rank"
BY_FILES = ("--launcher", "mpirun", "--rendezvous", "file")
REGISTERED = b"Register worker addr"
# A launcher that tells its ranks of no libraries, as srun; PyPI's mpirun sets LD_LIBRARY_PATH for all that it starts.
BARE = """\
#!/bin/bash
[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit
while [ "$1" != -n ]; do shift; done
size=$2
shift 2
for ((rank = 0; rank < size; rank++)); do
    export OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank
    OMPI_COMM_WORLD_SIZE=$size OMPI_COMM_WORLD_LOCAL_SIZE=$size "$@" &
done
wait
"""
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


class Lookups(NamedTuple):
    """Look-ups of names in the Python environment: of the launch, once for a job, and of the ranks on one node."""

    launch: int
    node: int


def lookups(*options: str, bare: bool) -> Lookups:
    """Count look-ups on a node by strace, without the script's own; a copy's archive has been made before."""
    # A copy's paths end with those of the originals.
    homes = [f'"{Path(home).resolve()}' for home in (sys.prefix, sys.base_prefix, hpcgpu.__path__[0])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text("import os; os._exit(0)\n")
        (launcher := Path(folder) / "mpirun").write_text(BARE)
        launcher.chmod(0o700)
        chosen = ["--launcher", str(launcher), "--rendezvous", "file"] if bare else ["--launcher", "mpirun"]
        launch = [str(BIN / "hpcgpu"), "launch", "--gpus", f"sim:{WORKERS}x16MiB", *chosen, *options]
        argv, env = [*launch, f"{folder}/script.py"], environment(HOME=folder, TMPDIR=folder)
        if "stage" in options:
            subprocess.run(argv, env=env, cwd=folder, capture_output=True, check=True, timeout=600)
        trace = ["strace", "-ff", "-e", "trace=%file,%process", "-o", f"{folder}/trace"]
        subprocess.run([*trace, *argv], env=env, cwd=folder, capture_output=True, check=True, timeout=600)
        lines = {file.suffix[1:]: file.read_text(errors="replace") for file in Path(folder).glob("trace.*")}
    below = [pid for pid, text in lines.items() if re.search(r'^execve\("[^"]*mpirun".*"-n"', text, re.MULTILINE)]
    for pid in below:  # grows: the launcher, and all processes and threads that it and they have started
        below += re.findall(r"^v?(?:clone3?|fork)\(.*\) = (\d+)$", lines.get(pid, ""), re.MULTILINE)
    counts = {
        pid: sum(any(home in line for home in homes) for line in text.splitlines()) for pid, text in lines.items()
    }
    of_node = sum(counts.get(pid, 0) for pid in below)
    return Lookups(sum(counts.values()) - of_node, of_node)


# One rank of one, and what binds it; /bin/true is the command. The first is the start of Python alone.
BINDS: list[tuple[str, list[str]]] = [
    ("python -c pass", [sys.executable, "-c", "pass"]),
    ("hpcgpu bind", [str(BIN / "hpcgpu"), "bind", "--gpus", "sim:1", "--", "/bin/true"]),
    ("numactl", ["numactl", "--physcpubind=+0", "--localalloc", "/bin/true"]),
]
ONE_RANK = {f"OMPI_COMM_WORLD_{name}": str(int(name.endswith("SIZE"))) for name in ("RANK", "SIZE")}
ONE_RANK |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


def cpu_ms(argv: Sequence[str]) -> float:
    """CPU milliseconds of a program that ends by itself."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, env=environment(**ONE_RANK), capture_output=True, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def names_looked_up(argv: Sequence[str]) -> float:
    """Calls with a name in the Python environment, or of hpcgpu, as strace counts them."""
    homes = {str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve()), str(Path(hpcgpu.__file__).parent)}
    with tempfile.NamedTemporaryFile("r", errors="replace") as trace:
        strace = ["strace", "-f", "-e", "trace=%file", "-o", trace.name, *argv]
        subprocess.run(strace, env=environment(**ONE_RANK), capture_output=True, check=True, timeout=60)
        return sum(any(home in line for home in homes) for line in trace)


def binds(runs: int) -> None:
    """Report what it costs one rank to be bound, before its own program starts."""
    case = "one rank is bound"
    there = [(who, argv) for who, argv in BINDS if shutil.which(argv[0])]
    costs = [{who: cpu_ms(argv) for who, argv in there} for _ in range(5 * runs)]  # by turns
    for who, argv in there:
        report(case, who, "cpu_ms", [each[who] for each in costs], "ms")
        if shutil.which("strace"):
            report(case, who, "lookups", [names_looked_up(argv)], "")
    for who in dict(BINDS).keys() - dict(there).keys():
        print(json.dumps(_figures.missing("startup", case, who, "cpu_ms", f"no {who} here", "ms")))


def report_lookups(copy: str, ranks: str, *, bare: bool) -> None:
    how = [f"{WORKERS} workers on a node, a rank per {ranks}"]
    how += ["from a copy"] * (copy == "stage") + ["by a launcher without libraries"] * bare
    case = ", ".join(how)
    if not shutil.which("strace"):
        print(json.dumps(_figures.missing("startup", case, "hpcgpu", "lookups_per_gpu", "no strace here", "")))
        return
    counted = lookups("--ranks", ranks, "--environment", copy, bare=bare)
    if copy == "plain":  # the launch of a copy looks once at each file of the environment
        report(case, "hpcgpu", "lookups_per_gpu", [sum(counted) / WORKERS], "")
    report(case, "hpcgpu", "lookups_per_gpu_of_ranks", [counted.node / WORKERS], "")
    report(case, "hpcgpu", "lookups_of_launch", [counted.launch], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only-bind", action="store_true", help="what hpcgpu bind costs a rank")
    runs = parser.parse_args().runs
    binds(runs)
    if parser.parse_args().only_bind:
        return
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
    for copy, ranks, bare in itertools.product(("plain", "stage"), ("gpu", "node"), (False, True)):
        report_lookups(copy, ranks, bare=bare)
    report("import", "hpcgpu", "import_ms", [imported() for _ in range(runs)], "ms")


if __name__ == "__main__":
    main()
