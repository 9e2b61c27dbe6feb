"""``benchmarks/main_job.py`` sets goals beside what was measured, and says which are met."""

from __future__ import annotations

import sys

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import main_job as job

OURS, PEER = "hpcgpu", "LocalCluster"


def judged(case: str, measure: str, ours: list[float], peer: list[float], spilled_mib: float = 0) -> dict[str, object]:
    values = {(case, OURS, m): ours for m in {"wall_s", measure}} | {(case, PEER, m): peer for m in {"wall_s", measure}}
    values[case, PEER, "host_to_disk_mib"] = [spilled_mib]
    (line,) = [f for f in job.lines(values, {}) if f["measure"] == f"{measure}_ratio"]
    assert line["who"] == f"{OURS} / {PEER}"
    return line


@pytest.mark.parametrize(
    ("case", "measure", "spilled_mib", "ours", "goal"),
    [
        ("tall SVD, tcp", "wall_s", 5.0, [7, 6, 9], "<= 0.7: met"),
        ("tall SVD, tcp", "wall_s", 0.0, [9, 9, 10], "<= 1.0: met"),
        ("tall SVD, tls", "wall_s", 5.0, [8, 8, 9], "<= 0.7: missed"),
        ("small tasks, tcp", "cpu_ms_per_task", 0.0, [10.4, 10.5, 11], "<= 1.05: met"),
        ("small tasks, tcp", "wall_s", 0.0, [10.2, 9.9, 11], "<= 1.0: within the spread"),
        ("idle, tls", "pss_mib", 0.0, [7.1, 7.2, 7.3], "<= 0.7: missed"),
    ],
)
def test_a_goal_is_met_by_the_median_or_within_the_spread(
    case: str, measure: str, spilled_mib: float, ours: list[float], goal: str
) -> None:
    line = judged(case, measure, ours, [10.0, 10.0, 10.0], spilled_mib)
    assert line["goal"] == goal
    assert line["value"] == sorted(ours)[1] / 10
    assert line["spread"] == [min(ours) / 10, max(ours) / 10]


def test_runs_are_compared_in_pairs() -> None:
    """A moment in which the machine is busy meets both."""
    line = judged("transpose-sum, tcp", "wall_s", [10, 20, 40], [11, 22, 44])
    assert line["spread"] == [0.909, 0.909]
    assert line["goal"] == "<= 1.0: met"


def test_a_peer_without_figures_is_named_with_the_reason_and_judges_nobody() -> None:
    values = {("tall SVD, tcp", "hpcgpu, GPU", "wall_s"): [1.0]}
    lines = list(job.lines(values, {("tall SVD, tcp", "LocalCUDACluster"): "not measured: ImportError: no dask_cuda"}))
    assert [(f["who"], f["value"], f["runs"]) for f in lines] == [
        ("hpcgpu, GPU", 1.0, 1),
        ("LocalCUDACluster", None, 0),
    ]
    assert "LocalCUDACluster                   not measured: ImportError: no dask_cuda" in job.table(lines)


def test_the_table_has_the_goals_at_its_end() -> None:
    values = {("idle, tcp", who, "pss_mib"): [mib, mib + 1, mib + 2] for who, mib in ((OURS, 300.0), (PEER, 600.0))}
    *rows, _, goal = job.table(list(job.lines(values, {}))).splitlines()
    assert "hpcgpu               pss_mib 301 (300 to 302)" in rows[1]
    wanted = "idle, tcp hpcgpu / LocalCluster pss_mib_ratio 0.501 (0.5 to 0.502) goal <= 0.7: met"
    assert " ".join(goal.split()) == wanted
