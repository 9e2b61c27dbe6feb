"""The jobs of a cluster as a table, in a terminal and in a notebook."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.jobs.record import Gone, RecordedJob
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.phase import End, JobView, Phase, describe, describe_after, describe_gone


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job.

    Attributes
    ----------
    view : JobView
        Its id and phase, in words.
    has : str
        What it is for: ``scheduler and workers``, ``scheduler``, ``workers``.
    nodes : int
        How many.
    log : str
        Path of its output.

    """

    view: JobView
    has: str
    nodes: int
    log: str


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a cluster.

    Attributes
    ----------
    rows : tuple of JobRow
        The one with the scheduler, and all others that are not gone.
    gone : tuple of JobRow
        The last few that ended though they were not asked to leave, the newest first.

    """

    rows: tuple[JobRow, ...]
    gone: tuple[JobRow, ...] = ()

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
        return f"<pre>{html.escape(str(self))}</pre>"


def head_row(job: Job, expected: int, nodes: int, end: End | None, *, workers: int, was_full: bool) -> JobRow:
    """Return the row of the job that has the scheduler.

    Parameters
    ----------
    job : Job
        The job.
    expected, nodes : int
        Its workers and nodes; without workers it is the scheduler alone, which is on none.
    end : End or None
        How the cluster object has ended.
    workers : int
        Registered ones of the job.
    was_full : bool
        All its workers have been there at once.

    """
    has, nodes = ("scheduler, workers", nodes) if expected else ("scheduler", 0)
    if end:
        return JobRow(describe_after(job.id, job.status, end), has, nodes, job.log)
    if not expected:
        return JobRow(JobView(job.id, Phase.UP, "UP"), has, nodes, job.log)
    facts = JobFacts(
        id=job.id,
        submitted_s=0.0,
        expected=expected,
        status=job.status,
        workers=workers,
        started_s=0.0 if was_full else None,
        was_full=was_full,
    )
    return JobRow(describe(facts, today()), has, nodes, job.log)


def member_row(recorded: RecordedJob, facts: JobFacts, end: End | None) -> JobRow:
    """Return the row of a job that comes and goes; ``end`` as of :func:`head_row`."""
    view = describe_after(facts.id, facts.status, end) if end else describe(facts, today())
    return JobRow(view, "workers", 1, recorded.log)


def jobs_of(rows: Sequence[JobRow], gone: Iterable[Gone], *, is_over: bool) -> Jobs:
    """Return the table of these rows and of jobs that ended unasked.

    Parameters
    ----------
    rows : sequence of JobRow
        The jobs that were there last.
    gone : iterable of Gone
        Those that are gone, the newest first.
    is_over : bool
        The cluster object has ended: rows of jobs that are gone with it are shown among these.

    """
    ended = [row for row in rows if is_over and row.view.phase is Phase.GONE]
    unasked = [
        JobRow(describe_gone(job.recorded.id, job.why, job.at, today()), "workers", 1, job.recorded.log) for job in gone
    ]
    return Jobs(tuple(row for row in rows if row not in ended), (*ended, *unasked))


def today() -> date:
    """Return the day by which a start is said: batch systems write local times."""
    return date.today()  # noqa: DTZ011
