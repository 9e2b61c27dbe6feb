"""Finished chunks that are dropped, by the user or distributed, before they are on disk: they are written."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Future, LocalCluster, wait
from waiting import LIMIT_S, until

from hpcgpu import Checkpoint

BEGUN, OPENED = threading.Event(), threading.Event()


class Gated:
    """A value that is pickled when it may be: the writer is behind."""

    def __reduce__(self) -> Any:
        BEGUN.set()
        OPENED.wait(30)  # not for ever: a test that fails closes its checkpoint
        return Gated, ()


@pytest.fixture
def client() -> Iterator[Client]:
    BEGUN.clear()
    OPENED.clear()
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    validated = dask.config.set({"distributed.scheduler.validate": True})
    with validated, LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client
        OPENED.set()


def tasks_of(dask_scheduler: Any) -> list[Any]:
    return list(dask_scheduler.tasks)


def wanted(client: str, dask_scheduler: Any) -> int:
    """Return how many keys the scheduler keeps for the client."""
    return len(dask_scheduler.clients[client].wants_what)


def behind(client: Client, checkpoint: Checkpoint) -> tuple[str, Any]:
    """Return a worker whose writer waits for a chunk, and a collection of this chunk and others."""
    one = min(client.nthreads())
    gate = client.submit(Gated, workers=[one])
    numbers = client.map(int, range(3), workers=[one])
    x = checkpoint.persist({"gate": gate}, name="gate", workers=[one])
    assert BEGUN.wait(LIMIT_S)
    y = checkpoint.persist(numbers, name="numbers", workers=[one])
    wait([x, y], timeout=LIMIT_S)
    return one, [x, y]


def check(client: Client, checkpoint: Checkpoint) -> None:
    OPENED.set()
    assert checkpoint.flush(LIMIT_S)
    assert [(row.name, row.done) for row in checkpoint.progress().rows] == [("gate", 1), ("numbers", 3)]


def test_dropped_collections_are_kept_until_they_are_written(client: Client, tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "run", client) as checkpoint:
        behind(client, checkpoint)
        until(lambda: not client.run_on_scheduler(wanted, client.id), "the client has dropped all", limit_s=60)
        check(client, checkpoint)
        until(lambda: not client.run_on_scheduler(tasks_of), "the scheduler has dropped all, too", limit_s=60)


def test_chunk_that_moved_is_written_where_it_is(client: Client, tmp_path: Path) -> None:
    """As distributed's active memory manager moves it."""
    with Checkpoint(tmp_path / "run", client) as checkpoint:
        one, collections = behind(client, checkpoint)
        (other,) = client.nthreads().keys() - {one}
        futures: list[Future] = collections[1]
        assert client.submit(sum, futures, workers=[other]).result(LIMIT_S) == 3

        def move(dask_scheduler: Any) -> None:
            dask_scheduler.request_remove_replicas(one, [future.key for future in futures], stimulus_id="test")

        client.run_on_scheduler(move)
        here = lambda: [set(owners) for owners in client.who_has(futures).values()] == 3 * [{other}]  # noqa: E731
        until(here, "they have moved", limit_s=60)
        check(client, checkpoint)


def test_line_of_a_checkpoint_is_followed_to_its_end(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OPENED.set()
    with Checkpoint(tmp_path / "run", client) as checkpoint:
        checkpoint.follow(0.01)
        behind(client, checkpoint)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hpcgpu: chunks")]
    assert len(set(lines)) == len(lines)
    assert lines[-1] == "hpcgpu: chunks on disk: gate 1 of 1, numbers 3 of 3"
