"""Chunks that are on disk when something is lost: they are read, and no task that made them runs again."""

import os
import signal
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait
from waiting import LIMIT_S, until

from hpcgpu import Checkpoint

# LocalCluster ends the nanny of a worker that was lost 15 s ago if no worker of that name is there then: also one that
# restart() is starting at that moment (distributed 2026.8.0, SpecCluster._update_worker_status).
LOST = "distributed.deploy.lost-worker-timeout"


def counted(block: Any, path: Path) -> Any:
    with path.open("ab", buffering=0) as file:
        file.write(b"x")
    return block


def array(ran: Path) -> Any:
    """Return an array of 6 chunks, each of 2 counted ones."""
    x = da.arange(1200, chunks=100).map_blocks(counted, ran, dtype=int, meta=np.empty(0, int))
    return x.rechunk(200).map_blocks(np.negative, dtype=int)


def lose_worker(client: Client) -> None:
    """Kill a worker that has chunks, and wait until the scheduler knows."""
    workers = client.run(lambda dask_worker: (len(dask_worker.data), os.getpid()))
    address, pid = next((address, pid) for address, (count, pid) in workers.items() if count)
    os.kill(pid, signal.SIGKILL)
    until(lambda: address not in client.scheduler_info(n_workers=-1)["workers"], "the worker has gone", limit_s=120)


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> None:
    resource_tracker.ensure_running()  # nannies start it, and it stays


def test_synced_chunks_are_read_after_each_loss(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": None}
    with (
        dask.config.set({"distributed.scheduler.validate": True, LOST: "1 hour"}),
        LocalCluster(**options) as cluster,
        Client(cluster) as client,
        Checkpoint(tmp_path / "run") as checkpoint,
    ):

        def still_there(x: Any, *, tasks: int = 12) -> None:
            assert np.array_equal((x + 0).compute(), -np.arange(1200))
            assert ran.stat().st_size == tasks
            assert checkpoint.flush(LIMIT_S)
            assert checkpoint.progress().rows[0].done == 6

        x = checkpoint.persist(array(ran), name="x")
        wait(x, timeout=LIMIT_S)
        still_there(x)
        lose_worker(client)
        still_there(x)
        for _ in range(2):
            lose_worker(client)
        client.wait_for_workers(2, timeout=LIMIT_S)
        still_there(x)
        client.retire_workers([next(iter(client.nthreads()))])
        still_there(x)
        client.restart()
        x = checkpoint.persist(array(ran), name="x")
        still_there(x)
        del x
        until(lambda: not client.run_on_scheduler(tasks_of), "the scheduler has no task of it", limit_s=120)
        x = checkpoint.persist(array(ran), name="x", overwrite=True)
        wait(x, timeout=LIMIT_S)
        still_there(x, tasks=24)
        checkpoint.remove("x")
        lose_worker(client)
        assert np.array_equal(x.compute(), -np.arange(1200))
        assert ran.stat().st_size > 24


def tasks_of(dask_scheduler: Any) -> list[Any]:
    return list(dask_scheduler.tasks)
