"""``benchmarks/main_job.py`` in its smallest size: what it prints has its form, and all cases are right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

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

SMALLEST = _sizes.SIZES["smallest"]


def test_clusters_are_measured_and_compared() -> None:
    """One run of the smallest size; test_main_job_goals.py has how figures are judged."""
    cases = ("hot and cold", "hot and cold, all fits", "idle")
    argv = [sys.executable, str(ROOT / "benchmarks/main_job.py"), "--size", "smallest", "--runs", "1", "--json"]
    done = ranks.run_command([*argv, "--protocols", "tls", "--only", *cases], timeout=scaled(170))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line.keys() >= {"bench", "case", "who", "measure", "value", "unit", "runs"} for line in lines)
    figures = {(line["case"], line["who"], line["measure"]): line["value"] for line in lines}
    for who in ("hpcgpu", "hpcgpu, host arrays", "LocalCluster"):
        assert figures["hot and cold, tls", who, "cpu_s"] > 0
        # the blocks alone, which the tiers in memory cannot hold
        assert figures["hot and cold, tls", who, "host_to_disk_mib"] > 0
        assert figures["hot and cold, all fits, tls", who, "host_to_disk_mib"] == 0
    assert figures["hot and cold, tls", "hpcgpu", "device_to_host_mib"] > 0
    # the client's process is no part of our cluster, but of distributed's
    assert 20 < figures["idle, tls", "hpcgpu", "pss_mib"] < figures["idle, tls", "hpcgpu", "pss_mib_with_client"] - 20
    assert {line["case"] for line in lines if "goal" in line} == {f"{case}, tls" for case in cases}


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
