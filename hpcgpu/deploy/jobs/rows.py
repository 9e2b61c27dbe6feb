"""Show the jobs of a cluster as a table, in a terminal and in a notebook."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import date

from hpcgpu.deploy.jobs.runs import RunStatus
from hpcgpu.errors import ConfigError
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.phase import describe
from hpcgpu.plan.jobs.request import first_workers, workers_per_node
from hpcgpu.plan.jobs.worker_names import count_by_job
from hpcgpu.report.cluster import jobs_table
from hpcgpu.report.table import Shown, Table


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


def jobs_of(run: RunStatus) -> tuple[Job, ...]:
    """Return the described jobs of a run, which may be another process's."""
    settings, jobs = run.run.document.settings, run.run.record.jobs
    members = [job.id for job in jobs if not job.is_head]
    head = next((job.id for job in jobs if job.is_head), "")
    counts = count_by_job(run.workers or (), members, head)

    def described(job: Job) -> Job:
        expected = 0
        with contextlib.suppress(ConfigError):  # the run could not be submitted
            expected = (first_workers if job.is_head else workers_per_node)(settings)
        job = replace(job, expected=expected).listed(run.states.get(job.id), 0.0)
        return describe(job.registered(counts[job.id], 0.0), today(), reached=run.workers is not None)

    return tuple(map(described, jobs))


def today() -> date:
    """Return the local date, which starts are compared with: batch systems write local times."""
    return date.today()  # noqa: DTZ011
