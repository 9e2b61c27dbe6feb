"""All runs of this user: poll their jobs together, show them, remove what has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

from hpcgpu.deploy.jobs.batch_client import ask
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.host import log
from hpcgpu.model import JobState
from hpcgpu.model.worker_names import count_by_job
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_text import describe
from hpcgpu.report.table import Shown, Table
from hpcgpu.report.workers import jobs_table


async def refresh(runs: Sequence[Run]) -> None:
    """Poll all jobs of runs, by one query for each batch system, and ask their schedulers for workers and use."""
    for batch in {run.record.batch for run in runs}:
        of_batch = [run for run in runs if run.record.batch == batch]
        job_ids = [job_id for run in of_batch for job_id in run.jobs]
        states = await ask(of_batch[0].system, job_ids)
        for run in of_batch:
            run.listed(tuple(run.jobs), states, 0.0)
    if running := [run for run in runs if any(job.state is JobState.RUNNING for job in run.jobs.values())]:
        from hpcgpu.deploy.network.scheduler_file import workers_and_use

        answers = await asyncio.gather(*(workers_and_use(run.folder) for run in running))
        for run, answer in zip(running, answers, strict=True):
            run.workers, run.use = answer or (None, {})


def clean_up(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Remove the folders of runs that are over, with a line for each; return the others."""
    left = []
    for run in runs:
        if run.owner_state == "alive" or run.not_ended:
            left.append(run)
            continue
        run.remove()
        logs = ", ".join(job.log for job in run.jobs.values()) or "it had no job"
        log.say(f"run {run.name} has ended and its owner is gone: removed from the list ({logs})")
    return tuple(left)


@dataclass(frozen=True, slots=True, repr=False)
class Jobs(Shown):
    """The described jobs of a cluster."""

    rows: tuple[Job, ...]  # the one with the scheduler, and all others that are not gone
    gone: tuple[Job, ...] = ()  # the last few that ended unasked, the newest first

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> Table:
        """The jobs, those that are gone last."""
        return jobs_table((*self.rows, *self.gone))


def jobs_of(run: Run) -> tuple[Job, ...]:
    """Return the described jobs of a run, which may be another process's."""
    members = [job.id for job in run.members]
    counts = count_by_job(run.workers or (), members, run.head.id if run.head else "")
    reached = run.workers is not None
    return tuple(describe(job.registered(counts[job.id], 0.0), today(), reached=reached) for job in run.jobs.values())


def today() -> date:
    """Return the local date, which starts are compared with: batch systems write local times."""
    return date.today()  # noqa: DTZ011
