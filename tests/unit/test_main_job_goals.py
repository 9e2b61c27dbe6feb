"""``benchmarks/main_job.py`` sets goals beside measurements, and says which are met."""

from __future__ import annotations

import sys

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import main_job as job

OURS, PEER = "hpcgpu", "LocalCluster"


@pytest.mark.parametrize(
    ("case", "measure", "spilled_mib", "ours", "goal"),
    [
        ("tall SVD, tcp", "wall_s", 5.0, [7, 6, 9], "<= 0.7: met"),
        ("tall SVD, tls", "wall_s", 5.0, [8, 8, 9], "<= 0.7: missed"),
        ("small tasks, tcp", "cpu_ms_per_task", 0.0, [10.4, 10.5, 11], "<= 1.05: met"),
        ("small tasks, tcp", "wall_s", 0.0, [10.2, 9.9, 11], "<= 1.0: within the spread"),
    ],
)
def test_goals_are_met_by_the_median_or_within_the_spread(
    case: str, measure: str, spilled_mib: float, ours: list[float], goal: str
) -> None:
    names = {"wall_s", measure}
    values = {(case, OURS, m): ours for m in names} | {(case, PEER, m): [10.0] * 3 for m in names}
    values[case, PEER, "host_to_disk_mib"] = [spilled_mib]
    lines = list(job.lines(values, {}))
    (line,) = [f for f in lines if f["measure"] == f"{measure}_ratio"]
    assert (line["who"], line["goal"], line["value"]) == (f"{OURS} / {PEER}", goal, sorted(ours)[1] / 10)
    assert line["spread"] == [min(ours) / 10, max(ours) / 10]
    assert f"goal {goal}" in job.table(lines)
