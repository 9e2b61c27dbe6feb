"""Values between two workers of one machine: hpcgpu with and without copies within the node, LocalCluster, and UCX.

Arrays lie on one worker, and a task on the other one asks for all of them; it looks at none. GiB/s, and CPU seconds of
both workers per GiB; for small tasks and at rest those of all processes of the run. Device arrays are simulated, and
cross as host bytes. With ``--cupy`` they are CuPy's, both workers are on one GPU, and nothing else is measured: not
LocalCluster either, whose way needs RMM or numba. ``ucx, polling``: ucxx's own waiting, by
``UCXPY_PROGRESS_MODE=polling``; both rows of UCX need the environment of ``make ucx``. With ``--delay-ms`` bytes cross
a loopback that holds each packet for so long, as a network between two machines does (root): sockets alone, and arrays
in host memory. One JSON line per figure; the median of ``--runs`` runs, in each of which all come in turn.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import _delay
import _figures
import numpy as np
import psutil
from distributed import Client, LocalCluster, Security, wait

from hpcgpu import LocalGPUCluster

MIB = 1 << 20
SIZES = {16 << 10: 1000, 64 << 10: 1000, 1 * MIB: 128, 64 * MIB: 8}  # of an array, and how many of them
TASKS, REST_S = 1000, 5.0
POLLING = {"UCXPY_PROGRESS_MODE": "polling"}
UCX: dict[str, Any] = {"protocol": "ucx"}
HAS_UCX = importlib.util.find_spec("distributed_ucxx") is not None
WHO: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    **{f"hpcgpu, {p}": ({"protocol": p}, {}) for p in ("tls", "tcp")},
    **{f"hpcgpu, {p}, node_copies=False": ({"protocol": p, "node_copies": False}, {}) for p in ("tls", "tcp")},
    **{f"LocalCluster, {p}": ({"peer": p}, {}) for p in ("tls", "tcp")},
    **({"hpcgpu, ucx": (UCX, {}), "hpcgpu, ucx, polling": (UCX, POLLING)} if HAS_UCX else {}),
}
Figures = dict[tuple[str, str, str], float]


def make_host(nbytes: int, _: int) -> Any:
    return np.ones(nbytes, dtype="u1")


def make_device(nbytes: int, _: int) -> Any:
    from hpcgpu import sim

    return sim.asarray(np.ones(nbytes, dtype="u1"))


def make_cupy(nbytes: int, _: int) -> Any:
    import cupy

    return cupy.asarray(np.ones(nbytes, dtype="u1"))


def take(*arrays: Any) -> int:
    return len(arrays)


def do_nothing(i: int) -> int:
    return i


@contextmanager
def cluster(options: dict[str, Any], environ: dict[str, str]) -> Iterator[tuple[Client, list[psutil.Process]]]:
    """Start two workers; yield a client, and all processes of the run."""
    before = dict(os.environ)  # a LocalCluster leaves its variables
    os.environ.update(environ)  # of the leader and the scheduler, too
    try:
        if peer := options.get("peer"):
            security = Security.temporary() if peer == "tls" else None
            same: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": "4GiB"}
            with (
                LocalCluster(protocol=peer, security=security, dashboard_address=None, **same) as theirs,
                Client(theirs) as client,
            ):
                yield client, [psutil.Process(), *psutil.Process().children(recursive=True)]
            return
        common: dict[str, Any] = {"gpus": "sim:2x2GiB", "dashboard": False, "quiet": True, "memory_limit": "4GiB"}
        with LocalGPUCluster(**{**common, **options}) as ours, Client(ours) as client:
            leader = psutil.Process(int(ours.job_id))
            yield client, [leader, *leader.children(recursive=True)]
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(options: dict[str, Any], environ: dict[str, str], *, on_gpu: bool, only_bytes: bool = False) -> Figures:
    """Return the figures of one cluster; ``on_gpu``: of CuPy's arrays alone; ``only_bytes``: of host memory alone."""
    makers: dict[str, Callable[[int, int], Any]] = {"host": make_host, "device": make_device}
    if on_gpu:
        makers, options = {"device, CuPy": make_cupy}, {"gpus": 1, "workers_per_gpu": 2, **options}
    out: Figures = {}
    with cluster(options, environ) as (client, processes):
        first, second = sorted(client.nthreads())
        for place, make in makers.items():
            for nbytes, count in SIZES.items():
                size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes >> 10} KiB"
                case = f"{count} arrays of {size}, {place}"
                if make is make_device and ("peer" in options or only_bytes):
                    continue
                for _ in range(2):  # the second time counts: memory that no process had for a while is slow
                    wall_s, cpu_s = transfer(client, first, second, functools.partial(make, nbytes), count)
                gib = nbytes * count / 2**30
                out[case, "gib_per_s", "GiB/s"] = gib / wall_s
                out[case, "cpu_s_per_gib", "s"] = cpu_s / gib
        assert "node_copies" not in options or any(client.run(cut_bytes).values())  # not by distributed's connection
        if on_gpu or only_bytes:
            return out
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


def cut_bytes() -> int:
    from hpcgpu.deploy.network.node_copies import this_process

    return this_process.cut_bytes


def used_s(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--cupy", action="store_true", help="measure CuPy's arrays, between two workers of one GPU")
    ways.add_argument("--delay-ms", type=float, nargs="+", default=[], help="such as 0 0.1, in turn")
    given = parser.parse_args()
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}

    def add(who: str, figures: Figures, where: str = "") -> None:
        for (case, name, unit), value in figures.items():
            values.setdefault((case + where, name, unit), {}).setdefault(who, []).append(value)

    with _delay.slow_loopback() if given.delay_ms else nullcontext(None) as set_delay:
        for _ in range(given.runs):
            for delay_ms in given.delay_ms or [0.0]:
                where = ""
                if set_delay:
                    where, trip_s = f", each packet held for {delay_ms:g} ms", set_delay(delay_ms / 1e3)
                    add("loopback", {("one byte there and back", "wall_ms", "ms"): trip_s * 1e3}, where)
                for who, (options, environ) in WHO.items():
                    by_socket = "peer" in options or "node_copies" in options
                    if by_socket if set_delay else not (given.cupy and "peer" in options):
                        figures = measure(options, environ, on_gpu=given.cupy, only_bytes=bool(set_delay))
                        add(who, figures, where)
    for (case, name, unit), by_who in values.items():
        for who, found in by_who.items():
            _figures.report("protocols", case, who, name, found, unit)


if __name__ == "__main__":
    main()
