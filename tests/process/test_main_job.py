"""``benchmarks/main_job.py`` in its smallest size: what it prints has its form, and all cases are right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
from distributed import Client, LocalCluster
from paths import ROOT

from hpcgpu import sim
from hpcgpu.sim.dask import register

sys.path.append(str(ROOT / "benchmarks"))

import _cases
import _sizes
from waiting import scaled

KEYS = {"bench", "case", "who", "measure", "value", "unit", "runs"}
TIERS = {"host_to_disk_mib", "disk_to_host_mib"}
SMALLEST = _sizes.SIZES["smallest"]


def main_job(*options: str) -> list[dict[str, Any]]:
    argv = [sys.executable, str(ROOT / "benchmarks/main_job.py"), "--size", "smallest", "--runs", "1", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(170), env=ranks.environment())
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_clusters_take_turns_and_goals_stand_beside_figures() -> None:
    lines = main_job("--only", "hot and cold", "--protocols", "tls", "--json")
    assert all(line.keys() >= KEYS and line["bench"] == "main_job" for line in lines)
    figures: dict[str, dict[str, float]] = {}
    for line in lines:
        if "goal" not in line and line["value"] is not None:
            figures.setdefault(line["who"], {})[line["measure"]] = line["value"]
    assert set(figures) >= {"hpcgpu", "hpcgpu, host arrays", "LocalCluster"}
    for who, values in figures.items():
        assert values.keys() >= {"wall_s", "first_wall_s", "cpu_s", "peak_pss_mib", "to_peers_mib"} | TIERS
        # the blocks alone, which the tiers in memory cannot hold
        assert values["host_to_disk_mib"] > 0, who
    assert figures["hpcgpu"]["device_to_host_mib"] > 0
    for line in [line for line in lines if "goal" in line]:
        ours, peer = line["who"].split(" / ")
        assert line["value"] == pytest.approx(figures[ours]["wall_s"] / figures[peer]["wall_s"], rel=0.01)
        assert line["goal"] == f"<= 0.7: {'met' if line['value'] <= 0.7 else 'missed'}"


def test_idle_workers_are_measured_without_the_client() -> None:
    figures = {(f["who"], f["measure"]): f["value"] for f in main_job("--only", "idle", "--protocols", "tcp", "--json")}
    ours, peer = figures["hpcgpu", "pss_mib"], figures["LocalCluster", "pss_mib"]
    # the client's process is no part of our cluster, but of distributed's
    assert 20 < ours < figures["hpcgpu", "pss_mib_with_client"] - 20
    assert 20 < peer == figures["LocalCluster", "pss_mib_with_client"]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    sim.set_current_gpu(sim.SimGpu(1 << 30))
    register()
    kept = {"processes": False, "dashboard_address": None}
    with LocalCluster(n_workers=1, threads_per_worker=1, **kept) as cluster, Client(cluster) as it:
        yield it


@pytest.mark.parametrize("name", [name for name in _cases.CASES if name not in _sizes.OF_THE_HOST])
def test_a_case_gives_the_same_wherever_its_arrays_are(client: Client, name: str) -> None:
    on_host, on_device = (_cases.CASES[name](client, SMALLEST, place) for place in ("host", "sim"))
    assert len(on_host) > 0
    assert on_device == pytest.approx(on_host, rel=1e-6)


def test_cases_without_arrays(client: Client) -> None:
    rows, parts = SMALLEST.frame
    counted, total = _cases.shuffle(client, SMALLEST, "host")
    assert counted == rows // parts * parts
    assert total == pytest.approx(counted / 2, rel=0.05)  # random numbers from 0 to 1
    assert _cases.small_tasks(client, SMALLEST, "host") == [sum(range(1, SMALLEST.tasks + 1))]
