"""Eight workers on two nodes of a real Slurm: seconds from submit to registered, CPU seconds per worker, and the end.

In the lab of ``docker/`` (as in the tests), beside dask-jobqueue, dask-mpi and SLURMRunner, each as their documents
show it. Both begin where the cluster is asked for, by a process that has imported all of them (a second and more, for
any that has a Client), and end when the eighth worker has registered; CPU is that of all containers, Slurm's own
processes included. Slurm starts a job 0.2 to 1 s after its submission, as its rounds fall: the second figure is without
that, from the moment at which the first job's log is there. One JSON line per figure; the median of ``--runs`` runs,
all ways in turn in each run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _figures
from _on_slurm import WAYS, WORKERS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from lab import CHECKOUT, Lab

CASE = f"{WORKERS} workers, 2 nodes"
report = functools.partial(_figures.report, "batch")
# Slurm puts off a job that comes soon after the last round of its scheduler (sched_min_interval is 2 s): without this
# wait the same way takes 1.5 or 3.9 s, by what was measured before it (22.05.8).
SETTLED_S = 5.0
REQUESTS, DEAD = "one request for 1000 jobs", "a dead job"
# Programs in front of sbatch and squeue note when they were called, and when they had answered.
NOTED = """
import json, os, pathlib, sys, time
folder = pathlib.Path.home() / "bench" / "noted"
folder.mkdir(parents=True, exist_ok=True)
for name in ("sbatch", "squeue"):
    (folder / name).write_text('''#!/bin/bash
a=$(date +%s%N); /usr/bin/${0##*/} "$@"; code=$?
echo $a $(date +%s%N) >> "$0.calls"; exit $code
''')
    (folder / name).chmod(0o755)
    (folder / f"{name}.calls").unlink(missing_ok=True)
os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
os.chdir(folder)
from hpcgpu import SLURMGPUCluster
def calls(name):
    return [[int(word) / 1e9 for word in line.split()] for line in (folder / f"{name}.calls").read_text().splitlines()]
given = dict(gpus="sim:4x16MiB", shape="elastic", scheduler="here", quiet=True, queue="main")
"""
# What is left of scale() when sbatch's own time is taken from it.
MANY = """
with SLURMGPUCluster(**given, job_extra_directives=["--hold"]) as cluster:
    start = time.monotonic()
    cluster.scale(jobs=1000)
    took = time.monotonic() - start
print(json.dumps({"own_s": took - sum(b - a for a, b in calls("sbatch")), "rpcs": len(calls("sbatch"))}), flush=True)
"""
# From squeue's answer that the job has ended until sbatch is called for another one.
REPLACED = """
with SLURMGPUCluster(**given) as cluster:
    cluster.scale(jobs=1)
    cluster.wait_for_workers(4)
    os.system(f"scancel {cluster.jobs.rows[-1].id}")
    while len(calls("sbatch")) < 2:
        time.sleep(0.01)
    again = calls("sbatch")[1][0]
    answered = max(end for _, end in calls("squeue") if end < again)
print(json.dumps({"replaced_s": again - answered}), flush=True)
"""
# Of cgroup v2, or of v1.
USAGE = """import pathlib
new, old = pathlib.Path("/sys/fs/cgroup/cpu.stat"), pathlib.Path("/sys/fs/cgroup/cpuacct/cpuacct.usage")
print(int(new.read_text().split()[1]) / 1e6 if new.exists() else int(old.read_text()) / 1e9)
"""


@dataclass
class Times:
    """What was measured of one way."""

    wall_s: list[float] = field(default_factory=list)
    from_job_start_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    close_s: list[float] = field(default_factory=list)


def cpu_s(lab: Lab) -> float:
    """CPU seconds of all containers since their start."""
    total = 0.0
    for container in (lab.login, *lab.nodes):
        said = lab.exec(container, ["python3", "-S", "-c", USAGE], user="root", check=True)
        total += float(said.stdout)
    return total


def answer(driver: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """Wait for the driver's line that begins with this figure; a peer may print lines of its own."""
    assert driver.stdout
    for line in driver.stdout:
        if line.startswith(f'{{"{name}"'):
            return dict(json.loads(line))
    raise RuntimeError(f"no {name}: {driver.communicate()[1]}")


def go_on(driver: subprocess.Popen[str]) -> None:
    assert driver.stdin
    driver.stdin.write("\n")
    driver.stdin.flush()


def measure(lab: Lab, way: str, times: Times) -> None:
    time.sleep(SETTLED_S)
    driver = lab.start(lab.login, ["python", f"{CHECKOUT}/benchmarks/_on_slurm.py", way], timeout=60)
    answer(driver, "imported")
    before = cpu_s(lab)
    go_on(driver)
    said = answer(driver, "wall_s")
    times.wall_s.append(said["wall_s"])
    times.from_job_start_s.append(said["from_job_start_s"])
    times.cpu_s.append(cpu_s(lab) - before)
    go_on(driver)
    times.close_s.append(answer(driver, "close_s")["close_s"])
    driver.wait(timeout=60)
    if left := lab.wait_idle(timeout=20):
        print(f"{way} has left behind: {left}", file=sys.stderr)
        lab.clean_up()


def ask(lab: Lab, code: str) -> dict[str, float]:
    """Run a script on the login node that ends with a line of JSON."""
    said = lab.exec(lab.login, ["python", "-c", NOTED + code], timeout=120, check=True).stdout
    lab.wait_idle(timeout=60)
    answer: dict[str, float] = json.loads(said.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("ways", nargs="*", default=list(WAYS))
    given = parser.parse_args()
    lab = Lab()
    with contextlib.nullcontext() if lab.is_up() else lab.down_at_the_end():
        lab.up()
        measure_all(lab, given.ways, given.runs)


def measure_all(lab: Lab, ways: Sequence[str], runs: int) -> None:
    """Measure in turn, and print the medians."""
    found = {way: Times() for way in ways}
    requests, replaced = [], []
    for _ in range(runs):
        for way, times in found.items():
            try:
                measure(lab, way, times)
            except RuntimeError as e:
                if way.startswith("hpcgpu"):
                    raise
                print(f"{way}: {e}", file=sys.stderr)  # dask-mpi's srun ended by a segmentation fault once
                lab.clean_up()
        requests.append(ask(lab, MANY))
        replaced.append(ask(lab, REPLACED)["replaced_s"])
    for way, times in ((way, times) for way, times in found.items() if times.close_s):
        report(CASE, way, "wall_s_to_8_workers", times.wall_s, "s")
        report(CASE, way, "s_from_job_start_to_8_workers", times.from_job_start_s, "s")
        report(CASE, way, "cpu_s_per_worker", [cpu / WORKERS for cpu in times.cpu_s], "s")
        report(CASE, way, "close_s", times.close_s, "s")
    report(REQUESTS, "hpcgpu", "own_s_scale_1000", [r["own_s"] for r in requests], "s")
    report(REQUESTS, "hpcgpu", "rpcs_scale_1000", [r["rpcs"] for r in requests], "requests")
    report(DEAD, "hpcgpu", "s_from_squeue_to_sbatch", replaced, "s")


if __name__ == "__main__":
    main()
