"""Run on the lab's login node by batch.py: start eight workers in the way that is named, say when, end them, say when.

``python _on_slurm.py WAY`` prints a JSON line when it has imported what people import, waits for a line on stdin,
submits, prints another when all workers are registered, waits again, ends the cluster and prints a third. The second
also says how long it was since Slurm had started the first job, which then opens its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORKERS = 8
HERE = Path.home() / "bench"
RUNNER = """
import asyncio, sys
from dask_jobqueue.slurm import SLURMRunner
from distributed import Client
if __name__ == "__main__":
    with SLURMRunner(scheduler_file=sys.argv[1], worker_class=sys.argv[2]) as runner, Client(runner) as client:
        client.wait_for_workers(8)
        open(sys.argv[1] + ".up", "w").close()
        import os, time
        while not os.path.exists(sys.argv[1] + ".end"):
            time.sleep(0.05)
"""


@contextlib.contextmanager
def jobqueue(jobs: int, processes: int, nanny: bool) -> Iterator[None]:
    from dask_jobqueue import SLURMCluster
    from distributed import Client

    given: dict[str, Any] = {"cores": processes, "processes": processes, "memory": f"{processes}GB", "nanny": nanny}
    with SLURMCluster(**given, walltime="00:10:00", log_directory=str(HERE)) as cluster, Client(cluster) as client:
        cluster.scale(jobs=jobs)
        client.wait_for_workers(WORKERS, timeout=120)
        yield


@contextlib.contextmanager
def batch_script(command: str, up: str) -> Iterator[None]:
    script = f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=4 -o {HERE}/%j.out\nexec {command}\n"
    job = subprocess.run(["sbatch", "--parsable"], input=script, text=True, capture_output=True, check=True).stdout
    try:
        wait = wait_for_scheduler_file if up.endswith("json") else wait_for_file
        with wait(Path(up)):
            yield
    finally:
        subprocess.run(["scancel", job.strip()], check=True)
        while subprocess.run(["squeue", "-h", "-j", job.strip()], capture_output=True, text=True).stdout.strip():
            time.sleep(0.05)


@contextlib.contextmanager
def wait_for_file(path: Path) -> Iterator[None]:
    while not path.exists():
        time.sleep(0.02)
    yield


@contextlib.contextmanager
def wait_for_scheduler_file(path: Path) -> Iterator[None]:
    from distributed import Client

    with wait_for_file(path), Client(scheduler_file=str(path)) as client:
        client.wait_for_workers(WORKERS, timeout=120)
        yield


def dask_mpi(worker_class: str) -> contextlib.AbstractContextManager[None]:
    file = HERE / f"{time.time_ns()}.json"
    run = f"dask-mpi --scheduler-file {file} --nthreads 1 --local-directory /tmp --worker-class {worker_class}"
    return batch_script(f"srun -n9 -O --cpu-bind=none --mpi=pmix {run}", str(file))


def slurm_runner(worker_class: str) -> contextlib.AbstractContextManager[None]:
    script, file = HERE / "runner.py", HERE / f"runner-{time.time_ns()}"
    script.write_text(RUNNER)
    srun = "srun -n10 -O --cpu-bind=none --mpi=none"
    return batch_script(f"{srun} python {script} {file} {worker_class}", f"{file}.up")


@contextlib.contextmanager
def ours(**given: Any) -> Iterator[None]:
    from distributed import Client

    from hpcgpu import SLURMGPUCluster

    common = {"gpus": "sim:4x16MiB", "walltime": "00:10:00", "log_directory": str(HERE), "quiet": True}
    with SLURMGPUCluster(**common, **given) as cluster, Client(cluster) as client:
        if given.get("shape") == "elastic":
            cluster.scale(WORKERS)
        client.wait_for_workers(WORKERS, timeout=120)
        yield


WAYS: dict[str, Any] = {
    "hpcgpu": lambda: ours(nodes=2),
    "hpcgpu, one rank per node": lambda: ours(nodes=2, ranks="node"),
    "hpcgpu, elastic": lambda: ours(shape="elastic", nodes=1),
    "dask-jobqueue, 8 jobs, nanny": lambda: jobqueue(8, 1, nanny=True),
    "dask-jobqueue, 2 jobs x 4, nanny": lambda: jobqueue(2, 4, nanny=True),
    "dask-mpi, nanny": lambda: dask_mpi("distributed.Nanny"),
    "SLURMRunner, nanny": lambda: slurm_runner("distributed.Nanny"),
    "dask-jobqueue, 8 jobs, no nanny": lambda: jobqueue(8, 1, nanny=False),
    "dask-mpi, no nanny": lambda: dask_mpi("distributed.Worker"),
    "SLURMRunner, no nanny": lambda: slurm_runner("distributed.Worker"),
}


def note_first_log(before: set[Path], seen: list[float]) -> None:
    """Note when the first log comes that was not there before."""
    while not set(HERE.glob("*.out")) - before:
        time.sleep(0.005)
    seen.append(time.monotonic())


def main(way: str) -> None:
    HERE.mkdir(exist_ok=True)
    os.chdir(HERE)
    from dask_jobqueue import SLURMCluster  # noqa: F401
    from distributed import Client  # noqa: F401

    from hpcgpu import SLURMGPUCluster  # noqa: F401

    print(json.dumps({"imported": way}), flush=True)
    sys.stdin.readline()
    seen: list[float] = []
    threading.Thread(target=note_first_log, args=(set(HERE.glob("*.out")), seen), daemon=True).start()
    start = time.monotonic()
    with WAYS[way]():
        there = time.monotonic()
        print(json.dumps({"wall_s": there - start, "from_job_start_s": there - seen[0]}), flush=True)
        sys.stdin.readline()
        end = time.monotonic()
    print(json.dumps({"close_s": time.monotonic() - end}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
