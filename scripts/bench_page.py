"""Make ``docs/benchmarks.md`` and its charts of ``docs/benchmarks/*.csv``: ``python scripts/bench_page.py [--check]``.

Charts need matplotlib (``pip install -e '.[docs]'``). ``--check`` writes nothing, and fails if the page or a chart
differs from the CSV files. Without the pinned matplotlib it compares the figures in each chart, not its drawing.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from xml.sax.saxutils import escape

from bench import FIGURES, ROOT, Row, read
from bench_model import Figures, Question
from bench_questions import ANSWERS

PAGE = ROOT / "docs/benchmarks.md"
HEAD = """# Benchmarks

hpcgpu beside what else starts Dask workers. GPUs are simulated here; the notes have
[figures of a real GPU](benchmarks-notes.md#on-an-h200). A bar or a dot is the median of several runs. A thin line goes
from the least to the most of the runs; pale dots are single cases. hpcgpu is blue.

<!-- scripts/bench_page.py writes this page. -->
"""
FOOT = """## All figures

`make bench` measures everything again and writes CSV files, this page and its charts.
`python scripts/bench.py NAME` measures one benchmark again, and `python scripts/bench_page.py` makes the page and the
charts of the CSV files. The first lines of `benchmarks/NAME.py` define each measure.
[runs.csv](benchmarks/runs.csv) has the machine and all versions of each run, and
[the notes](benchmarks-notes.md) have measurements behind decisions.
"""


def questions(folder: Path = FIGURES) -> list[Question]:
    """Answer all questions from the CSV files."""
    figures = Figures(folder)
    out = []
    for answer in ANSWERS:
        figures.sources = set()
        out.append(answer(figures))
        out[-1].sources = figures.sources
    return out


def fill(text: str) -> str:
    """Wrap a paragraph."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Render a table; the first row is its head."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def section(question: Question, runs: Sequence[Row]) -> str:
    """Render a question: finding, chart, where it was measured, table."""
    places: dict[str, list[str]] = {}
    for run in runs:
        if (run["bench"], run["measured"]) in question.sources:
            machine = run["machine"].partition(", Linux")[0]
            note = f" ({run['note']})" if run["note"] else ""
            places.setdefault(f"{run['measured']} on {machine}", []).append(
                f"[{run['bench']}](benchmarks/{run['bench']}.csv){note}"
            )
    where = "; ".join(f"{', '.join(links)}, {place}" for place, links in places.items())
    parts = [
        f"## {question.title}",
        fill(question.finding),
        fill(f"![{question.alt}](benchmarks/{question.name}.svg)"),
        fill(f"Measured: {where}."),
        table(question.table),
        table(question.more) if question.more else "",
        fill(question.note),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def page(answers: Sequence[Question], runs: Sequence[Row]) -> str:
    """Render the page."""
    return "\n".join((HEAD, *(section(question, runs) for question in answers), FOOT))


def data(question: Question) -> str:
    """Return all that a chart shows, a line for each mark; charts contain it as their description."""
    lines = [
        f"{panel.title} | {mark.label} | {mark.series} | {mark.figure.value:g}"
        + ("" if mark.figure.least is None else f" ({mark.figure.least:g} to {mark.figure.most:g})")
        + ("" if not mark.figure.points else " of " + " ".join(f"{point:g}" for point in mark.figure.points))
        for panel in question.panels
        for mark in panel.marks
    ]
    return escape("\n".join(lines))


def has_pinned_matplotlib() -> bool:
    """Tell whether charts drawn here are the same bytes as everywhere."""
    try:
        number = metadata.version("matplotlib")
    except metadata.PackageNotFoundError:
        return False
    return f"matplotlib=={number}\n" in (ROOT / "constraints-docs.txt").read_text()


def differences() -> list[str]:
    """Return what differs from the CSV files: the page, charts, rows that are there twice or without their run."""
    answers = questions()
    out = [] if PAGE.read_text() == page(answers, read(FIGURES / "runs.csv")) else ["docs/benchmarks.md"]
    charts = {FIGURES / f"{question.name}.svg": question for question in answers}
    out += [p.name for p, q in charts.items() if not p.exists() or f"<desc>{data(q)}</desc>" not in p.read_text()]
    if has_pinned_matplotlib():
        import bench_charts

        drawn = {p: bench_charts.draw(q, data(q)) for p, q in charts.items() if p.exists()}
        out += [f"{p.name}: another drawing" for p, text in drawn.items() if text != p.read_text()]
    out += [p.name for p in FIGURES.glob("*.svg") if p not in charts]
    files = {path.stem: read(path) for path in FIGURES.glob("*.csv") if path.stem != "runs"}
    runs = {(run["bench"], run["measured"]) for run in read(FIGURES / "runs.csv")}
    rows = [(name, row["case"], row["measure"], row["who"]) for name, rows in files.items() for row in rows]
    out += [f"{row} twice" for row in set(rows) if rows.count(row) > 1]
    used = {(name, row["measured"]) for name, rows in files.items() for row in rows}
    return out + [f"runs.csv: {run}" for run in used ^ runs]


def main(argv: list[str]) -> None:
    """Write the page and the charts, or compare them."""
    if argv == ["--check"]:
        if wrong := differences():
            sys.exit(f"not as docs/benchmarks/*.csv say: {', '.join(wrong)}. python scripts/bench_page.py writes them")
        return
    import bench_charts

    answers = questions()
    PAGE.write_text(page(answers, read(FIGURES / "runs.csv")))
    for question in answers:
        (FIGURES / f"{question.name}.svg").write_text(bench_charts.draw(question, data(question)))


if __name__ == "__main__":
    main(sys.argv[1:])
