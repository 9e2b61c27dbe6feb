"""Show the jobs of a cluster as a table, in a terminal and in a notebook."""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import date

from hpcgpu.deploy.jobs.run import Run
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.phase import describe
from hpcgpu.plan.jobs.worker_names import count_by_job
from hpcgpu.plan.views import notebook

_TITLES = ("job", "state", "has", "nodes", "log")


@dataclass(frozen=True, slots=True)
class Jobs:
    """The described jobs of a cluster."""

    rows: tuple[Job, ...]  # the one with the scheduler, and all others that are not gone
    gone: tuple[Job, ...] = ()  # the last few that ended unasked, the newest first

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cells(self) -> list[tuple[str, str, str, str, str]]:
        """The texts of the table, row by row: id, state, processes, number of nodes, log."""
        return [(job.id, job.text, job.has, str(job.nodes), job.log) for job in (*self.rows, *self.gone)]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, header_style="bold", pad_edge=False)
        for title in _TITLES:
            table.add_column(title, overflow="fold")
        for cells in self.cells:
            table.add_row(*cells)
        out = io.StringIO()
        Console(file=out, width=160, color_system=None, force_jupyter=False).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return notebook.jobs_page(self.cells)


def jobs_of(run: Run) -> tuple[Job, ...]:
    """Return the described jobs of a run, which may be another process's."""
    members = [job.id for job in run.members]
    counts = count_by_job(run.workers or (), members, run.head.id if run.head else "")
    reached = run.workers is not None
    return tuple(describe(job.registered(counts[job.id], 0.0), today(), reached=reached) for job in run.jobs.values())


def today() -> date:
    """Return the local date, which starts are compared with: batch systems write local times."""
    return date.today()  # noqa: DTZ011
