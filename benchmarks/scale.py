"""Thousands of workers that join, have heartbeats and die, and ranks that meet by files; CPU time, memory and delays.

The workers are a few processes that say what workers say (``tests/support/crowd.py``), over TLS: a connection each,
and two of each node of eight, one of which ends when its workers have joined. Beside us: distributed's LocalCluster,
whose scheduler and cluster object are one process, and whose workers have another connection each for their heartbeats,
and one for their nanny while they join. One JSON line per figure.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _figures
import psutil
from distributed import Client, LocalCluster
from distributed.security import Security

from hpcgpu import SLURMGPUCluster
from hpcgpu.agent.meet_by_files import meet_by_files
from hpcgpu.deploy.processes.scheduler import silent
from hpcgpu.model import RankFacts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from crowd import JOB, Crowd, tree_cpu_s, write_slurm

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PER_JOB, PER_NODE, PROCESSES = 4, 8, 4
MIB = 1 << 20
report = functools.partial(_figures.report, "scale")


@contextmanager
def ours(jobs: int) -> Iterator[tuple[Any, int]]:
    """Yield a cluster and the process of its scheduler."""
    options = {"gpus": f"sim:{PER_JOB}", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
    with tempfile.TemporaryDirectory() as folder:
        write_slurm(Path(folder), jobs)
        os.environ.update(ROOT, HOME=folder, PATH=f"{folder}:{os.environ['PATH']}")
        with SLURMGPUCluster(**options, log_directory=folder, quiet=True) as cluster:
            cluster.scale(jobs=jobs)
            with Client(cluster) as client:
                yield cluster, client.run_on_scheduler(os.getpid)
        os.environ["PATH"] = os.environ["PATH"].removeprefix(f"{folder}:")


@contextmanager
def theirs(jobs: int) -> Iterator[tuple[Any, int]]:
    secured = {"security": Security.temporary(), "protocol": "tls", "dashboard_address": None}
    with LocalCluster(n_workers=0, silence_logs="error", **secured) as cluster:
        yield cluster, os.getpid()


def watch_loop(dask_scheduler: Any = None) -> None:
    """Record in a scheduler how late its loop is at most, and the CPU time of its longest turn: others add nothing."""
    dask_scheduler.late_s = dask_scheduler.held_s = 0.0
    loop = asyncio.get_running_loop()
    turn = loop._run_once

    def timed() -> None:
        begin_s = time.thread_time()
        turn()
        dask_scheduler.held_s = max(dask_scheduler.held_s, time.thread_time() - begin_s)

    loop._run_once = timed

    def look(due_s: float) -> None:
        dask_scheduler.late_s = max(dask_scheduler.late_s, time.monotonic() - due_s)
        dask_scheduler.loop.call_later(0.05, look, time.monotonic() + 0.05)

    look(time.monotonic())


def latest(dask_scheduler: Any = None) -> tuple[float, float]:
    """Return both figures since the last question."""
    found = dask_scheduler.late_s, dask_scheduler.held_s
    dask_scheduler.late_s = dask_scheduler.held_s = 0.0
    return found


def lost(dask_scheduler: Any = None) -> int:
    """Return how many workers are gone, or count as silent."""
    return dask_scheduler._workers_removed_total + len(silent(dask_scheduler.workers))


def steps(cluster: Any, pid: int, count: int, who: str, *connections: int) -> None:
    """Run one crowd through all that happens, and report each."""
    names = [f"{JOB}_{i // PER_JOB}-{i % PER_JOB}" for i in range(count)]
    process, case = psutil.Process(pid), f"{count} workers"
    with Client(cluster) as client, Crowd(cluster, PROCESSES, *connections) as crowd:
        client.run_on_scheduler(watch_loop)

        def cost(work: Callable[[], object], what: str) -> tuple[float, float]:
            client.run_on_scheduler(latest)
            start_s, cpu_s = time.monotonic(), sum(process.cpu_times()[:2])
            work()
            took_s, cpu_s = time.monotonic() - start_s, sum(process.cpu_times()[:2]) - cpu_s
            late_s, held_s = client.run_on_scheduler(latest)
            report(case, who, f"loop_late_s_with_{what}", [late_s], "s")
            report(case, who, f"longest_turn_cpu_s_with_{what}", [held_s], "s")
            return cpu_s, took_s

        before = process.memory_info().rss
        first = count - count // 10
        cpu_s, took_s = cost(lambda: crowd.join(names[:first]), "joins")
        report(case, who, "cpu_ms_per_join", [cpu_s / first * 1e3], "ms")
        report(case, who, "join_s", [took_s], "s")
        cpu_s, took_s = cost(lambda: crowd.join(names[first:]), "joins_of_the_last_tenth")
        report(case, who, "cpu_ms_per_join_of_the_last_tenth", [cpu_s / (count - first) * 1e3], "ms")
        report(case, who, "memory_mib_per_1000", [(process.memory_info().rss - before) / MIB / count * 1e3], "MiB")
        report(case, who, "descriptors_per_worker", [process.num_fds() / count], "")
        cpu_s, took_s = cost(lambda: crowd.beat(60.0 if count >= 4000 else 20.0, 5.0), "heartbeats")
        report(case, who, "cpu_share_with_a_heartbeat_in_5_s", [cpu_s / took_s], "")
        report(case, who, "workers_lost_or_silent_after_heartbeats", [client.run_on_scheduler(lost)], "")
        dead = count // 8 // PROCESSES * PROCESSES
        cpu_s, took_s = cost(lambda: (crowd.die(dead), gone(client, count - dead)), "deaths")
        report(case, who, "cpu_ms_per_death", [cpu_s / dead * 1e3], "ms")
        crowd.leave()


def gone(client: Client, left: int) -> None:
    """Wait until the scheduler has so many workers left."""
    while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.workers)) > left:
        time.sleep(0.05)


def meet(folder: str, first: str, count: str, size: str) -> None:
    """Be some ranks of a launch, each in a thread; print when they came and when the last one met, and the CPU time."""
    threading.stack_size(MIB // 4)
    common = {"isolated": False, "scheduler": None, "gpus": 8, "devices": "", "cpus": "0-127", "trouble": ""}
    begin_s = time.time()

    def one(rank: int) -> None:
        record = {"rank": rank, "host": f"n{rank // 8}", "leader_socket": "" if rank % 8 else "x" * 30, **common}
        meet_by_files(record, RankFacts(rank=rank, size=int(size), launcher="srun"), Path(folder), 300)

    threads = [threading.Thread(target=one, args=(int(first) + i,)) for i in range(int(count))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(begin_s, time.time(), time.process_time())


def meeting(count: int) -> tuple[float, list[float]]:
    """Seconds from a late rank 0 until all ranks of a launch have met by files, and of CPU of one alone and of others.

    Nine processes have 111 of them each: a rank among threads takes more than one alone, and they share these cores.
    """
    cuts = [1, *range(2, count, 111), count]
    with tempfile.TemporaryDirectory() as folder:

        def ranks(first: int, each: int) -> subprocess.Popen[str]:
            argv = [sys.executable, __file__, "--meet", f"{folder}/ranks", str(first), str(each), str(count)]
            return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

        others = [ranks(first, end - first) for first, end in itertools.pairwise(cuts)]
        time.sleep(20)  # they look once a second by now
        before_s = [tree_cpu_s(str(each.pid)) for each in others]
        times = [[float(text) for text in each.communicate()[0].split()] for each in (ranks(0, 1), *others)]
        used_s = [cpu_s - before for (_, _, cpu_s), before in zip(times[1:], before_s, strict=True)]
        return max(end_s for _, end_s, _ in times) - times[0][0], [used_s[0], sum(used_s[1:]) / (count - 2)]


def one(who: str, count: str) -> None:
    """Measure one cluster; in a process of its own, which has no free memory of the one before."""
    # of a worker, all at once; and workers of a node whose nannies share one
    make, *connections = {"hpcgpu": (ours, 2, int(count), PER_NODE), "distributed": (theirs, 3, int(count))}[who]
    with make(-(-int(count) // PER_JOB)) as (cluster, pid):
        steps(cluster, pid, int(count), who, *connections)


def main() -> None:
    if sys.argv[1:2] in (["--meet"], ["--one"]):
        {"--meet": meet, "--one": one}[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", default="250,1000,4000")
    options = parser.parse_args()
    met_s, cpu_s = meeting(1000)
    case = "1,000 ranks meet by files after rank 0 has come"
    report(case, "hpcgpu", "wall_s", [met_s], "s")
    for what, used_s in zip(("a_rank_in_a_process", "a_rank_among_threads"), cpu_s, strict=True):
        report(case, "hpcgpu", f"cpu_ms_of_{what}", [used_s * 1e3], "ms")
    for count in options.counts.split(","):
        for who in ("hpcgpu", "distributed"):
            subprocess.run([sys.executable, __file__, "--one", who, count], check=True)


if __name__ == "__main__":
    main()
