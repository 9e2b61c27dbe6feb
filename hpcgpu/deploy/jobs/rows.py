"""Show the jobs of a cluster as a table, in a terminal and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from hpcgpu.deploy.jobs.run import Run
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.phase import describe
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


def jobs_of(run: Run) -> tuple[Job, ...]:
    """Return the described jobs of a run, which may be another process's."""
    members = [job.id for job in run.members]
    counts = count_by_job(run.workers or (), members, run.head.id if run.head else "")
    reached = run.workers is not None
    return tuple(describe(job.registered(counts[job.id], 0.0), today(), reached=reached) for job in run.jobs.values())


def today() -> date:
    """Return the local date, which starts are compared with: batch systems write local times."""
    return date.today()  # noqa: DTZ011
