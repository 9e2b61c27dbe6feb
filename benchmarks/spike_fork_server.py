"""Workers forked by hpcgpu's fork server, and by distributed's: ``forkserver`` of the standard library, and ``spawn``.

Each cluster, of 2 or 6 workers, is started by a process of its own, which then restarts one worker. Medians of
``--runs`` runs, in which all come in turn; CPU seconds are of all processes. Decision 0023 has the figures.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from typing import Any

KINDS = ("hpcgpu", "forkserver", "spawn")


def cpu_s() -> float:
    """Return the CPU seconds of this process and those below it, also of the ended ones that were waited for."""
    import psutil

    me, total = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        times = process.cpu_times()
        total += sum(times[:4])
    return total


def start(kind: str, count: int) -> Any:
    if kind == "hpcgpu":
        from hpcgpu import LocalGPUCluster

        return LocalGPUCluster(gpus=f"sim:{count}x64MiB", dashboard=False, quiet=True)
    import dask
    from distributed import LocalCluster

    dask.config.set({"distributed.worker.multiprocessing-method": kind})
    return LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address=None)


def measure(kind: str, count: int) -> dict[str, float]:
    """Return the figures of one cluster."""
    from distributed import Client

    began, before = time.perf_counter(), cpu_s()
    with start(kind, count) as cluster, Client(cluster) as client:
        client.wait_for_workers(count)
        out = {"start_s": time.perf_counter() - began, "start_cpu_s": cpu_s() - before}
        began = time.perf_counter()
        client.restart_workers([min(client.nthreads())])
        client.wait_for_workers(count)
        return {**out, "restart_s": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "COUNT"))
    given = parser.parse_args()
    if given.only:
        logging.disable(logging.WARNING)
        print(json.dumps(measure(given.only[0], int(given.only[1]))))
        return
    rows: dict[tuple[str, int], list[dict[str, float]]] = {(kind, n): [] for n in (2, 6) for kind in KINDS}
    for _ in range(given.runs):
        for (kind, count), found in rows.items():
            argv = [sys.executable, __file__, "--only", kind, str(count)]
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    for (kind, count), found in rows.items():
        for name in found[0]:
            value = round(statistics.median(row[name] for row in found), 2)
            row = {"who": kind, "case": f"{count} workers", "measure": name, "value": value}
            print(json.dumps({"bench": "spike_fork_server", **row}))


if __name__ == "__main__":
    main()
