"""tcp, tls and UCX between two workers of one machine: GiB/s, CPU seconds per GiB, small tasks, and the cost at rest.

Arrays lie on one worker, and a task on the other one asks for all of them; it looks at none. CPU seconds are those of
both workers; at rest and for small tasks those of all processes of the run. Device arrays are simulated, so that they
cross as host bytes. Beside ``ucx`` stands ``ucx, polling``: ucxx's own waiting, by ``UCXPY_PROGRESS_MODE=polling``.
It runs in the environment of ``make ucx``. One JSON line per figure; the median of ``--runs`` runs, in each of which
all come in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
from distributed import Client, wait

from hpcgpu import LocalGPUCluster

MIB = 1 << 20
SIZES = {1 * MIB: 128, 64 * MIB: 8}  # of an array, and how many of them
TASKS, REST_S = 1000, 5.0
POLLING = {"UCXPY_PROGRESS_MODE": "polling"}
WHO: dict[str, tuple[str, dict[str, str]]] = {
    "tcp": ("tcp", {}),
    "tls": ("tls", {}),
    "ucx": ("ucx", {}),
    "ucx, polling": ("ucx", POLLING),
}
Figures = dict[tuple[str, str, str], float]


def make_host(nbytes: int, _: int) -> Any:
    return np.ones(nbytes, dtype="u1")


def make_device(nbytes: int, _: int) -> Any:
    from hpcgpu import sim

    return sim.asarray(np.ones(nbytes, dtype="u1"))


def take(*arrays: Any) -> int:
    return len(arrays)


def do_nothing(i: int) -> int:
    return i


@contextmanager
def cluster(protocol: str, environ: dict[str, str]) -> Iterator[tuple[Client, list[psutil.Process]]]:
    """Start two workers; yield a client, and all processes of the run."""
    os.environ.update(environ)  # of the leader and the scheduler, too
    try:
        options: dict[str, Any] = {"gpus": "sim:2x2GiB", "dashboard": False, "quiet": True, "memory_limit": "4GiB"}
        with LocalGPUCluster(protocol=protocol, **options) as it, Client(it) as client:
            leader = psutil.Process(int(it.job_id))
            yield client, [leader, *leader.children(recursive=True)]
    finally:
        for name in environ:
            del os.environ[name]


def measure(protocol: str, environ: dict[str, str]) -> Figures:
    """Return what a cluster of one protocol gives."""
    out: Figures = {}
    with cluster(protocol, environ) as (client, processes):
        first, second = sorted(client.scheduler_info()["workers"])
        for place, make in (("host", make_host), ("device", make_device)):
            for nbytes, count in SIZES.items():
                case = f"{count} arrays of {nbytes // MIB} MiB, {place}"
                wall_s, cpu_s = transfer(client, first, second, lambda i, m=make, n=nbytes: m(n, i), count)
                gib = nbytes * count / 2**30
                out[case, "gib_per_s", "GiB/s"] = gib / wall_s
                out[case, "cpu_s_per_gib", "s"] = cpu_s / gib
        case, before, began = f"{TASKS} tasks that do nothing", used_s(processes), time.perf_counter()
        client.gather(client.map(do_nothing, range(TASKS), pure=False))
        out[case, "wall_ms_per_task", "ms"] = (time.perf_counter() - began) / TASKS * 1e3
        out[case, "cpu_ms_per_task", "ms"] = (used_s(processes) - before) / TASKS * 1e3
        time.sleep(1)  # what the tasks have left to do
        before = used_s(processes)
        time.sleep(REST_S)
        out["leader, scheduler and 2 workers at rest", "cores", ""] = (used_s(processes) - before) / REST_S
    return out


def transfer(client: Client, first: str, second: str, make: Callable[[int], Any], count: int) -> tuple[float, float]:
    """Return wall seconds and the workers' CPU seconds in which the second worker got all arrays of the first."""
    arrays = client.map(make, range(count), workers=[first], pure=False)
    wait(arrays)
    before = sum(client.run(time.process_time).values())
    began = time.perf_counter()
    assert client.submit(take, *arrays, workers=[second], pure=False).result() == count
    wall_s = time.perf_counter() - began
    return wall_s, sum(client.run(time.process_time).values()) - before


def used_s(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for _ in range(runs):
        for who, (protocol, environ) in WHO.items():
            for figure, value in measure(protocol, environ).items():
                values.setdefault(figure, {}).setdefault(who, []).append(value)
    for (case, name, unit), by_who in values.items():
        for who, found in by_who.items():
            figure = {
                "case": case,
                "who": who,
                "measure": name,
                "value": round(statistics.median(found), 4),
                "unit": unit,
            }
            print(json.dumps({"bench": "protocols", **figure, "runs": len(found)}), flush=True)


if __name__ == "__main__":
    main()
