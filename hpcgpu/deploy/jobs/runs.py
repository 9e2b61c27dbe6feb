"""All runs of this user: find them by name, poll them together, end them, and clean up after dead clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import shutil
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import record as records
from hpcgpu.deploy.jobs.batch_client import ask, cancel, look
from hpcgpu.deploy.jobs.ending import end
from hpcgpu.deploy.jobs.job_plan import mark_of
from hpcgpu.deploy.jobs.record import Record, Run
from hpcgpu.deploy.network.lease import is_detached, is_held
from hpcgpu.errors import ConfigError, JobError, SubmitError
from hpcgpu.host import log, pids
from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job import Job
from hpcgpu.spill.storage import scratch
from hpcgpu.supervise import tasks

# A job whose lease has ended is gone within 5 s; a batch system gives 5 to 30 s after a cancel.
_BY_ITSELF_S = 5.0
_ENDING_S = 60.0
_ASK_S = 2.0
# An sbatch outlives its client, and tries for 2 minutes where slurmctld is "temporarily unable to accept job".
_SUBMITTING_S, _LOOK_S = 130.0, 5.0
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run, and the present state of its jobs, its client and its workers."""

    run: Run
    states: Mapping[str, JobStatus]  # by job id, without jobs that the batch system no longer lists
    client: str  # alive, dead or detached
    workers: tuple[str, ...] | None = None  # registered names; None: the scheduler cannot be reached from here

    @property
    def is_over(self) -> bool:
        """True if all of its jobs have ended, and no client waits for them."""
        return self.client != "alive" and not not_ended(self.run.record, self.states)


def find(home: Path, name: str) -> Run:
    """Return the run with this job name, job id, array id, element's id, or folder name.

    Raises ConfigError, with a list of the runs, for no run of that name, or several.
    """
    all_runs = records.runs(home, warn)
    matches = [run for run in all_runs if name in names(run)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{len(matches)} runs have the name {name!r}; give the id of a job: {_listed(matches)}")
    existing = _listed(all_runs) if all_runs else f"none (searched in {home})"
    raise ConfigError(f"there is no run {name!r}; there are: {existing}")


def names(run: Run) -> set[str]:
    """Return all names of a run."""
    job_ids = {name for job in run.record.jobs for name in (job.id, *re.findall(r"^\d+", job.id))}
    return {run.record.name, run.folder.name, *job_ids} - {""}


def _listed(runs: Iterable[Run]) -> str:
    return ", ".join(
        f"{run.record.name} ({'job ' + run.record.jobs[0].id if run.record.jobs else 'no job yet'}, "
        f"since {run.record.created.astimezone():%Y-%m-%d %H:%M})"
        for run in runs
    )


def ids(record: Record) -> list[str]:
    """Return the ids of all jobs of a run."""
    return [job.id for job in record.jobs if job.id]


def not_ended(record: Record, states: Mapping[str, JobStatus]) -> list[str]:
    """Return the ids of the jobs of a run that have not ended."""
    return [i for i in ids(record) if i in states and states[i].state is not JobState.ENDED]


async def still_there(record: Record) -> list[str]:
    """Poll the jobs of a run; return those that have not ended."""
    return not_ended(record, await _states(record.system, ids(record)))


async def see(home: Path) -> tuple[RunStatus, ...]:
    """Return the status of all runs, as :func:`look_at` does."""
    return await look_at(await asyncio.to_thread(records.runs, home, warn))


async def look_at(runs: Sequence[Run]) -> tuple[RunStatus, ...]:
    """Return the status of runs, by one query for all jobs of a batch system."""
    states: dict[str, dict[str, JobStatus]] = {}
    for batch in {run.record.batch for run in runs}:
        of_batch = [run.record for run in runs if run.record.batch == batch]
        job_ids = [job_id for record in of_batch for job_id in ids(record)]
        states[batch] = await ask(of_batch[0].system, job_ids) if job_ids else {}
    clients = await asyncio.to_thread(lambda: [_client(run) for run in runs])
    statuses = []
    for run, client in zip(runs, clients, strict=True):
        listed = states[run.record.batch]
        statuses.append(RunStatus(run, {i: listed[i] for i in ids(run.record) if i in listed}, client))
    return tuple(await asyncio.gather(*map(_with_workers, statuses)))


async def _with_workers(run: RunStatus) -> RunStatus:
    if not any(status.state is JobState.RUNNING for status in run.states.values()):
        return run
    from hpcgpu.deploy.network.scheduler_file import worker_names

    return replace(run, workers=await worker_names(run.run.folder))


def sweep(home: Path) -> None:
    """Remove the leftovers of dead processes: runs without a record, and folders of this node."""
    records.sweep(home)
    scratch.sweep(scratch.home_of(None))


def clean_up(runs: Iterable[RunStatus]) -> tuple[RunStatus, ...]:
    """Remove the folders of runs that are over, with a line for each; return the others."""
    left = []
    for status in runs:
        if not status.is_over:
            left.append(status)
            continue
        run = status.run
        shutil.rmtree(run.folder, ignore_errors=True)
        logs = ", ".join(job.log for job in run.record.jobs) or "it had no job"
        warn(f"run {run.record.name} has ended and its client is gone: removed from the list ({logs})")
    return tuple(left)


def _client(run: Run) -> str:
    if is_detached(run.folder):
        return "detached"
    client = run.record.client
    if client.host == socket.gethostname() and pids.start_time(client.pid) == client.start_time:
        return "alive"
    # on another host, or attached: its signs of life count
    return "alive" if is_held(run.folder, run.document.settings.client_grace_s) else "dead"


async def abandon(folder: Path) -> None:
    """End the jobs that a dead client has left; called by its guard.

    Pending jobs are cancelled at once. Running jobs end by their lease. They are left alone as long as another client,
    attached to the run, renews it.
    """
    run = Run(folder, await _cancel_pending(folder))
    grace_s = run.document.settings.client_grace_s
    now = asyncio.get_running_loop().time
    end_s = now() + grace_s + _BY_ITSELF_S

    async def is_over() -> bool | None:
        """Return True if no job is left or the grace is over; False if the run goes on without a client."""
        nonlocal end_s
        if not await still_there(run.record):
            return True
        if await asyncio.to_thread(is_detached, folder):
            return False
        if await asyncio.to_thread(is_held, folder, grace_s):
            end_s = now() + _BY_ITSELF_S
        return True if now() > end_s else None

    if await tasks.until(is_over, _ASK_S):
        await finish(run)


async def _cancel_pending(folder: Path) -> Record:
    """Cancel pending jobs, even with lost ids; return the record with all jobs, lost ones included."""
    record, now_s = await asyncio.to_thread(records.read, folder), asyncio.get_running_loop().time
    system, end_s = record.system, now_s() + (_SUBMITTING_S if record.submitting else 0.0)

    async def once() -> Record | None:
        nonlocal record
        with contextlib.suppress(FileNotFoundError):  # another object may go on submitting
            record = await asyncio.to_thread(records.read, folder)
        recorded = ids(record)
        lost = await _answered(functools.partial(look, system, record.name, mark_of(folder), recorded))
        states = await _states(system, [*recorded, *lost])
        if pending := [i for i, status in states.items() if status.state in WAITING]:
            try:
                await _answered(lambda: cancel(system, pending))
            except SubmitError as e:
                warn(str(e))  # a final refusal
        jobs = (*record.jobs, *(Job(id=job_id) for job_id in lost))
        return replace(record, jobs=jobs) if lost or now_s() > end_s else None

    return await tasks.until(once, _LOOK_S)


async def stop(run: Run) -> None:
    """End a run, even another client's: by a goodbye to its scheduler if reachable, else by the batch system.

    Raises JobError if its jobs still exist after a minute.
    """
    from hpcgpu.deploy.network.scheduler_file import (
        say_goodbye,
    )  # imports distributed: 0.3 s, which no guard should pay

    record = run.record
    if await say_goodbye(run.folder):

        async def has_ended() -> bool | None:
            return None if await still_there(record) else True

        with contextlib.suppress(TimeoutError):
            await tasks.until(has_ended, _ASK_S / 4, 2 * _BY_ITSELF_S)
    await finish(run)


async def finish(run: Run) -> None:
    """Cancel the jobs that have not ended, wait until the batch system says that they have, and remove the folder.

    Raises JobError if they still exist after a minute.
    """
    left, why = await end(run.record.system, ids(run.record), _ENDING_S, warn)
    while why and why.transient:  # wait for a batch system that is away; each round has its time limit
        left, why = await end(run.record.system, left, _ENDING_S, warn)
    if left:
        reason = f": {why}" if why else ""
        raise JobError(f"jobs {', '.join(left)} were cancelled {_ENDING_S:g} s ago, but still exist{reason}")
    await asyncio.to_thread(shutil.rmtree, run.folder, ignore_errors=True)


async def _states(system: BatchSystem, job_ids: list[str]) -> dict[str, JobStatus]:
    """Return the states of jobs, waiting for a batch system that is away."""
    return await _answered(lambda: ask(system, job_ids)) if job_ids else {}


async def _answered(request: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the batch system's answer, waiting if it is away for a while."""

    async def once() -> tuple[Answer] | None:
        try:
            return (await request(),)
        except SubmitError as e:
            if not e.transient:
                raise
            warn(str(e))
            return None

    return (await tasks.until(once, _ASK_S))[0]


def warn(text: str) -> None:
    """Print a line for the user, or into the guard's log."""
    log.say(text)
