"""The summary of a run: sums over the workers' lives, advice, and the lines that people read."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.report.summary import Summary, covered_s, sum_up
from hpcgpu.report.workers import Moved, WorkerFacts

GIB = 1 << 30
USED = Summary(
    wall_s=3600,
    walltime_s=7200,
    gpus=4,
    workers=4,
    gpu_s=14400,
    idle_gpu_s=1440,
    busy_share=0.9,
    moved_bytes={"device_to_host": 0},
    peak_bytes={"device": 10 * GIB, "host": GIB, "disk": 0, "process": 30 * GIB},
    limit_bytes={"device": 16 * GIB, "process": 60 * GIB},
)


def life(name: str, begin_s: float, end_s: float, busy_s: float, **more: object) -> WorkerFacts:
    return WorkerFacts(name=name, node="n", gpu=f"GPU-{name}", begin_s=begin_s, end_s=end_s, busy_s=busy_s, **more)


def test_lives_are_summed_up() -> None:
    lives = [
        life("0", 0, 40, 20, moved={"device_to_host": Moved(5)}, peaks={"device": 7}, device_limit_bytes=9),
        life("0", 50, 100, 50, moved={"device_to_host": Moved(6)}, peaks={"device": 3}, device_limit_bytes=9),
        life("1", 0, 100, 0),
        WorkerFacts(name="cpu0", begin_s=0, end_s=100, busy_s=0),
    ]
    usage = sum_up(lives, 110, 600)
    assert (usage.gpus, usage.workers, usage.restarts) == (2, 3, 1)
    assert (usage.gpu_s, usage.idle_gpu_s) == (190, 120)
    assert usage.busy_share == pytest.approx(70 / 190)
    assert usage.moved_bytes["device_to_host"] == 11
    assert (usage.peak_bytes["device"], usage.limit_bytes["device"]) == (7, 9)
    assert sum_up([], 1).busy_share is None


def test_workers_that_share_a_gpu_hold_it_once() -> None:
    shared = [replace(life(name, 0, 10, 8), gpu="GPU-0") for name in "ab"]
    usage = sum_up(shared, 10)
    assert (usage.gpus, usage.gpu_s, usage.idle_gpu_s) == (1, 10, 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda x: (min(x), max(x)))))
def test_the_union_of_intervals(found: list[tuple[int, int]]) -> None:
    assert covered_s(found) == len({second for begin, end in found for second in range(begin, end)})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"busy_share": 0.2}, "1 GPU in place of 4"),
        ({"busy_share": 0.45}, "3 GPUs in place of 4"),
        ({"busy_share": 0.2, "moved_bytes": {"device_to_host": 1}}, ""),
        ({"wall_s": 30.0, "busy_share": 0.2}, ""),
        ({"wall_s": 600.0}, "a time limit of 00:15:00 in place of 02:00:00"),
        ({"wall_s": 7000.0}, "a longer time limit"),
        ({"peak_bytes": {"process": 4 * GIB}}, "less host memory: 6.0 GiB for each worker in place of 60.0 GiB"),
        ({"peak_bytes": {"process": 59 * GIB}}, "more host memory: a worker's process took 59.0 GiB of 60.0 GiB"),
        ({"peak_bytes": {"process": 4 * GIB, "disk": GIB}}, "more host memory, or more GPUs: up to 1.0 GiB"),
    ],
)
def test_advice(changed: dict[str, object], said: str) -> None:
    advice = replace(USED, **changed).advice
    assert advice == () if not said else advice[0].startswith(said) and len(advice) == 1


def test_lines_and_json() -> None:
    summary = replace(USED, busy_share=0.2, restarts=1)
    text = str(summary)
    assert text.startswith("01:00:00 with 4 GPUs, 4.00 GPU hours, a task ran in 20% of the workers' time, ")
    assert "24.0 GPU minutes idle, 1 worker started anew\n" in text
    assert "device 10.0 GiB of 16.0 GiB" in text
    assert "nothing was spilled\nnext time: 1 GPU in place of 4" in text
    found = json.loads(summary.as_json())
    assert (found["gpu_hours"], found["idle_gpu_minutes"], found["busy_share"]) == (4, 24, 0.2)
    assert Summary(**asdict(summary)) == summary
