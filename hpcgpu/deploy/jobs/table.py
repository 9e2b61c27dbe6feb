"""The jobs of a cluster as a table, in a terminal and in a notebook."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from datetime import date

from hpcgpu.plan.jobs.phase import JobView


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
        The last few that ended though nobody had asked them to leave, the newest first.

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


def today() -> date:
    """Return the day by which a start is said: batch systems write local times."""
    return date.today()  # noqa: DTZ011
