"""The dashboard's page of GPUs, Dask's own pages of GPUs, and the metrics: by Bokeh's client and over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client

from hpcgpu import LocalGPUCluster, sim
from hpcgpu.deploy.dashboard.page import GpuPage
from hpcgpu.plan.views.gpus import GpuFacts

SIZES = (("n-0", 3), ("n-1", 4))
SUPPORT = Path(__file__).parents[2] / "support"
CROWD, LOOK = SUPPORT / "gpu_crowd.py", SUPPORT / "bokeh_page.py"


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """The dashboard of a cluster of two GPUs that hold something."""
    with LocalGPUCluster(gpus="sim:2x64MiB", quiet=True) as cluster, Client(cluster) as client:
        held = client.map(lambda i: sim.asarray(np.full(8 << 20, i, "u1")), range(16))
        assert client.gather(client.map(lambda x: int(x[0]), held)) == list(range(16))
        yield cluster.dashboard_link.removesuffix("/status")


def page(url: str, condition: str) -> dict[str, Any]:
    """What a page holds when the condition holds."""
    done = subprocess.run([sys.executable, str(LOOK), url, condition], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_shows_each_gpu_and_goes_on(base: str) -> None:
    found = page(f"{base}/gpus", f"sum(data['device_top']) >= {64 << 20} and len(data['time']) > 2 and '<img' in texts")
    data = found["data"]
    assert len(data["name"]) == 2
    assert sum(data["disk_top"]) >= 128 << 20  # the tiers lie on each other
    assert "2 GPUs on 1 node; Dask&#x27;s data: " in found["texts"]


def test_dasks_own_page_knows_simulated_gpus(base: str) -> None:
    found = page(f"{base}/gpu", f"sum(data['memory']) >= {64 << 20}")
    assert max(found["data"]["memory"]) <= 64 << 20
    assert any(title.endswith("/ 128.00 MiB") for title in found["titles"])


def test_metrics_for_prometheus(base: str) -> None:
    with urllib.request.urlopen(f"{base}/hpcgpu/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = answer.read().decode().splitlines()
    devices = [float(line.split()[-1]) for line in lines if 'tier="device"' in line]
    assert (len(devices), 64 << 20 <= sum(devices) <= 128 << 20) == (2, True)
    server = base.rpartition("/")[0]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server}/hpcgpu/metrics")


def test_a_gpu_that_is_chosen_is_shown_over_time() -> None:
    ledger = SimpleNamespace(gpus=lambda: [GpuFacts(name=name, tier_bytes={"device": size}) for name, size in SIZES])
    page = GpuPage(None, ledger, SimpleNamespace(add_next_tick_callback=lambda _: None))
    page.update()
    assert list(page._lines.source.data["device"]) == [7]
    page._table.source.selected.indices = [1]
    assert list(page._lines.source.data["device"]) == [4]
    assert page._lines.memory.title.text.endswith("over time: n-1")
    page._table.source.selected.indices = []
    assert page._lines.memory.title.text.endswith("over time: all GPUs")


def test_it_is_read_with_400_gpus() -> None:
    with subprocess.Popen(
        [sys.executable, str(CROWD), "400"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as crowd:
        assert crowd.stdin
        assert crowd.stdout
        found = page(crowd.stdout.readline().decode().strip(), "len(data['image']) > 1")
        crowd.stdin.close()
    assert len(found["data"]["name"]) == 400
    assert found["data"]["name"][:3] == ["node000-2", "node014-1", "node032-2"]  # those that are not as planned
    assert "3 of 400 workers not as planned" in found["texts"]
    assert len(found["data"]["image"][0]) == 400
