"""Show the jobs of a cluster as a table, in a terminal and in a notebook."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date

from hpcgpu.deploy.jobs.record import Gone
from hpcgpu.deploy.jobs.runs import RunStatus
from hpcgpu.errors import ConfigError
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.phase import (
    End,
    JobView,
    Phase,
    describe,
    describe_after,
    describe_gone,
    describe_scheduler,
    describe_unreached,
)
from hpcgpu.plan.jobs.request import first_workers, workers_per_node
from hpcgpu.plan.jobs.worker_names import count_by_job
from hpcgpu.plan.views import notebook


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job."""

    view: JobView  # id and phase, in words
    has: str  # scheduler, workers, or both
    nodes: int  # how many
    log: str  # path


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a cluster."""

    rows: tuple[JobRow, ...]  # the one with the scheduler, and all others that are not gone
    gone: tuple[JobRow, ...] = ()  # the last few that ended unasked, the newest first

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in ("job", "state", "has", "nodes", "log"):
            table.add_column(title, overflow="fold")
        for row in (*self.rows, *self.gone):
            table.add_row(row.view.id, row.view.text, row.has, str(row.nodes), row.log)
        out = io.StringIO()
        Console(file=out, width=160, color_system=None, force_jupyter=False).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = ((r.view.id, r.view.text, r.has, str(r.nodes), r.log) for r in (*self.rows, *self.gone))
        return notebook.jobs_page(rows)


def head_row(facts: JobFacts, nodes: int, log: str, end: End | None) -> JobRow:
    """Make the row of the job that has the scheduler, which is on none of the nodes if it has no workers.

    ``end`` is how the cluster object has ended, if it has.
    """
    if facts.expected:
        return _row(facts, "scheduler, workers", nodes, log, end)
    row = _row(facts, "scheduler", 0, log, end)
    return row if end else replace(row, view=describe_scheduler(facts.id))


def member_row(facts: JobFacts, log: str, end: End | None) -> JobRow:
    """Make the row of a job that comes and goes; the parameters are those of :func:`head_row`."""
    return _row(facts, "workers", 1, log, end)


def _row(facts: JobFacts, has: str, nodes: int, log: str, end: End | None) -> JobRow:
    view = describe_after(facts.id, facts.status, end) if end else describe(facts, today())
    return JobRow(view, has, nodes, log)


def jobs_of(rows: Sequence[JobRow], gone: Iterable[Gone], *, is_over: bool) -> Jobs:
    """Make the table of these rows and of jobs that ended unasked, the newest first.

    ``is_over``: the cluster object has ended, and rows of jobs that are gone with it are shown among the ended ones.
    """
    ended = [row for row in rows if is_over and row.view.phase is Phase.GONE]
    unasked = [
        JobRow(describe_gone(job.recorded.id, job.why, job.at, today()), "workers", 1, job.recorded.log) for job in gone
    ]
    return Jobs(tuple(row for row in rows if row not in ended), (*ended, *unasked))


def views_of(seen: RunStatus) -> tuple[JobView, ...]:
    """Describe the jobs of a run, which may be another process's."""
    record, settings = seen.run.record, seen.run.document.settings
    kinds = {job.id: job.kind for job in record.jobs}
    members = [job_id for job_id, kind in kinds.items() if kind == "member"]
    head = next((job_id for job_id, kind in kinds.items() if kind == "head"), "")
    counts = count_by_job(seen.workers or (), members, head)

    def view(job_id: str) -> JobView:
        expected = 0
        with contextlib.suppress(ConfigError):  # the run could not be submitted
            expected = (workers_per_node if job_id in members else first_workers)(settings)
        facts = JobFacts(id=job_id, submitted_s=0.0, expected=expected).listed(seen.states.get(job_id), 0.0)
        describe_ = describe_unreached if seen.workers is None else describe
        return describe_(facts.registered(counts[job_id], 0.0), today())

    return tuple(map(view, kinds))


def today() -> date:
    """Return the local date, which starts are compared with: batch systems write local times."""
    return date.today()
