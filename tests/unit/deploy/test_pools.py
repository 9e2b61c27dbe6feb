"""How many workers each pool should have, by a real scheduler; and whose job one is that was found again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from distributed import Client, Scheduler, Worker
from fleets import make_run

from hpcgpu.batch import get
from hpcgpu.deploy.jobs import Pool, Run
from hpcgpu.deploy.jobs.fleet import SchedulerView
from hpcgpu.deploy.processes.scheduler import workers_for
from hpcgpu.plan.jobs.job import Job


@contextlib.asynccontextmanager
async def running(*resources: dict[str, float]) -> AsyncIterator[tuple[Scheduler, Client]]:
    """Start a scheduler, and a worker of two threads with each of the resources."""
    async with contextlib.AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(Scheduler(dashboard_address=":0", port=0))
        for each in resources:
            options = {"nthreads": 2, "resources": each, "dashboard": False}
            await stack.enter_async_context(Worker(scheduler.address, **options))
        yield scheduler, await stack.enter_async_context(Client(scheduler.address, asynchronous=True))


def wanted(scheduler: Scheduler, nthreads: int = 1, target_duration: float = 0.5) -> dict[str, int]:
    pools = ("cpu", "big")
    return {pool: workers_for(scheduler, pool, pools, nthreads, target_duration) for pool in ("", *pools)}


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_tasks_ask_for_workers_of_the_pool_that_they_name() -> None:
    async with running() as (scheduler, client):
        assert wanted(scheduler) == {"": 0, "cpu": 0, "big": 0}
        named = client.map(abs, range(3), resources={"cpu": 1})
        await until(lambda: len(scheduler.unrunnable) == 3)
        assert wanted(scheduler) == {"": 0, "cpu": 3, "big": 0}
        assert wanted(scheduler, target_duration=60)["cpu"] == 1
        assert wanted(scheduler, nthreads=2)["cpu"] == 2
        others = client.map(abs, range(-2, 0), resources={"GPU": 1})
        await until(lambda: len(scheduler.unrunnable) == 5)
        assert wanted(scheduler) == {"": 2, "cpu": 3, "big": 0}
        del named, others


async def test_busy_workers_of_a_pool_stay_and_idle_ones_leave() -> None:
    async with running({"cpu": 2}, {"cpu": 2}, {}) as (scheduler, client):
        assert wanted(scheduler) == {"": 0, "cpu": 0, "big": 0}
        held = client.map(lambda _: __import__("time").sleep(0.5), range(8), resources={"cpu": 1})
        await until(lambda: sum(len(worker.processing) for worker in scheduler.workers.values()) == 8)
        assert wanted(scheduler)["cpu"] >= 2
        assert wanted(scheduler)[""] == 0  # its worker is idle, though the others are not
        del held


def test_job_found_again_is_of_the_pool_of_its_workers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", get("slurm"))
    run.pools["cpu"] = Pool(document=run.record.document, workers=2)
    run.add([Job(id="7"), Job(id="8", pool="cpu")])
    registered = {"tls://a": {"name": "7-0", "resources": {"cpu": 1.0}}, "tls://b": {"name": "8-0", "resources": {}}}
    view = SchedulerView(
        scheduler=lambda: None,
        workers=lambda: registered,
        searching=bool,
        changed=bool,
        say=print,
        end=lambda: None,
    )
    run.registered(view.present("", run.pools, elastic=True), 1.0)
    assert {job.id: job.pool for job in run.jobs.values()} == {"7": "cpu", "8": ""}
    run.save()
    again = Run.open(run.folder)
    assert {job.id: job.pool for job in again.jobs.values()} == {"7": "cpu", "8": ""}
    assert (again.pools, again.jobs["7"].expected) == (run.pools, 2)
