"""``docs/benchmarks.md`` and its charts, and the CSV files of their figures."""

from __future__ import annotations

import sys
from pathlib import Path

from paths import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench
import bench_page


def test_page_and_charts_show_the_figures_of_the_csv_files() -> None:
    assert bench_page.differences() == []


def test_a_benchmark_with_options_replaces_only_its_figures(tmp_path: Path) -> None:
    def values() -> list[tuple[str, str, str]]:
        return [(row["case"], row["value"], row["most"]) for row in bench.read(tmp_path / "load.csv")]

    figure = {"bench": "load", "case": "a", "measure": "ms", "who": "hpcgpu", "value": 2, "unit": "ms", "runs": 3}
    bench.record("load", [figure, {**figure, "case": "b"}], [], tmp_path)
    bench.record("load", [{**figure, "value": 5, "spread": [4, 7]}], ["--only", "a"], tmp_path)
    assert values() == [("a", "5", "7"), ("b", "2", "")]
    bench.record("load", [{**figure, "value": None, "why": "no GPU"}], [], tmp_path)
    assert values() == [("a", "", "")]
    assert [run["options"] for run in bench.read(tmp_path / "runs.csv")] == [""]
