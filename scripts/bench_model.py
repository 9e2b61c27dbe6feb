"""Figures of ``docs/benchmarks/*.csv``, and what a section of the page and its chart are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import Row, read


@dataclass(frozen=True)
class Figure:
    """A median, with the least and the most of the runs, or all points of a distribution."""

    value: float
    least: float | None = None
    most: float | None = None
    points: tuple[float, ...] = ()


@dataclass(frozen=True)
class Mark:
    """A figure in a chart: its place on the axis of labels, and the series that gives its colour."""

    label: str
    series: str
    figure: Figure


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a chart."""

    kind: str  # bars, dots, lines
    title: str
    marks: tuple[Mark, ...]
    log: bool = False
    colours: str = "series"  # or peers: one colour for hpcgpu, another for all others


@dataclass
class Question:
    """A section of the page."""

    name: str  # of the chart's file
    title: str
    panels: list[Panel]
    columns: int  # of panels
    finding: str
    alt: str
    table: list[Sequence[str]]
    sources: set[tuple[str, str]] = field(default_factory=set)  # benchmarks, and when they were measured
    note: str = ""
    more: list[Sequence[str]] = field(default_factory=list)  # a second table


class Figures:
    """The rows of all CSV files; notes which of them a section uses."""

    def __init__(self, folder: Path) -> None:
        self.runs = read(folder / "runs.csv")
        self.rows = {bench: read(folder / f"{bench}.csv") for bench in {run["bench"] for run in self.runs}}
        self.sources: set[tuple[str, str]] = set()

    def select(self, bench: str, measure: str, keep: Callable[[Row], bool]) -> list[Row]:
        """Return the rows of a measure that were measured."""
        rows = [row for row in self.rows[bench] if row["measure"] == measure and row["value"] and keep(row)]
        self.sources |= {(bench, row["measured"]) for row in rows}
        return rows

    def get(self, bench: str, case: str, measure: str, who: str) -> Figure | None:
        """Return one figure; None if it was not measured."""
        rows = self.select(bench, measure, lambda row: (row["case"], row["who"]) == (case, who))
        return to_figure(rows[-1]) if rows else None

    def value(self, bench: str, case: str, measure: str, who: str) -> float:
        """Return the median of one figure, which exists."""
        figure = self.get(bench, case, measure, who)
        if figure is None:
            raise LookupError(f"{bench}.csv has no figure of {case}, {measure}, {who}")
        return figure.value

    def marks(self, bench: str, measure: str, cases: dict[str, str], who: dict[str, str]) -> tuple[Mark, ...]:
        """Return the figures of cases, each with its label, of those who have one, each with a series."""
        every = ((label, s, self.get(bench, c, measure, w)) for c, label in cases.items() for w, s in who.items())
        return tuple(Mark(label, series, figure) for label, series, figure in every if figure)


def to_figure(row: Row) -> Figure:
    """Return the figure of a row."""
    least, most = (float(row[name]) if row[name] else None for name in ("least", "most"))
    return Figure(float(row["value"]), least, most)


def short(value: float | None) -> str:
    """Format with three digits."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ranged(figure: Figure | None, digits: int = 2) -> str:
    """Format a figure with its spread."""
    if figure is None:
        return "-"
    spread = "" if figure.least is None else f" ({figure.least:,.{digits}f} to {figure.most:,.{digits}f})"
    return f"{figure.value:,.{digits}f}{spread}"


def counted(requests: int) -> str:
    """Format a number of requests."""
    return "1 request to Slurm" if requests == 1 else f"{requests} requests to Slurm"


def span(values: Sequence[float]) -> str:
    """Format the range of several values."""
    low, high = short(min(values)), short(max(values))
    return low if low == high else f"{low} to {high}"


def listed(names: Sequence[str]) -> str:
    """Join names that may have commas."""
    return "; ".join(names) or "none"
