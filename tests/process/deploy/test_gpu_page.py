"""The dashboard's page of GPUs, Dask's own pages of GPUs, and the metrics: by Bokeh's client and over HTTP."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser
import numpy as np
import pytest
from distributed import Client
from waiting import scaled

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
    done = subprocess.run(
        [sys.executable, str(LOOK), url, condition], capture_output=True, text=True, timeout=scaled(90)
    )
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


def test_the_menu_says_gpus(base: str) -> None:
    with urllib.request.urlopen(f"{base}/gpus") as answer:
        assert '<a href="gpus">GPUs</a>' in answer.read().decode()


def test_page_marks_workers_that_are_not_as_planned() -> None:
    """Colour alone is not seen by everybody."""
    facts = [GpuFacts(name=name, tier_bytes={"device": size}, limit_bytes={"device": 8}) for name, size in SIZES]
    facts[1] = replace(facts[1], differences=("2 of 9 threads may run on PUs 0",))
    page = GpuPage(None, SimpleNamespace(gpus=lambda: facts), SimpleNamespace(add_next_tick_callback=lambda _: None))
    page.update()
    first, second = page._bars.source.data["mark"]
    assert np.isnan(first)
    assert second > 4
    assert "white-space:nowrap'>n-1</span>" in page._head.text
    facts = [replace(facts[1], name=f"n-{i}", tier_bytes={"device": i}) for i in range(400)]
    page._bars.show(facts, fresh=True)
    assert page._bars.source.data["mark"].min() > 399  # in one line, above all bars


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


@contextlib.contextmanager
def crowd_of(gpus: int) -> Iterator[str]:
    """The address of the page of so many GPUs."""
    argv = [sys.executable, str(CROWD), str(gpus)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(argv, **pipes, text=True) as crowd:
        yield crowd.stdout.readline().strip()
        crowd.stdin.close()


def part(number: int) -> str:
    """Return an expression for a part of the page as the browser shows it, from the top."""
    return f"Bokeh.index.find_one(Bokeh.documents[0].roots()[0].children[{number}])"


def history(whose: str, only: int) -> str:
    """Return an expression that is true when the history is this one's, and its last bytes are those of this bar."""
    titles = "Bokeh.documents[0].roots()[0].children[3].children.map(c => c.title.text)"
    shown = f"{part(3)}.child_views[0].model.renderers[0].data_source.data.device.at(-1)"
    bar = f"{part(1)}.model.renderers[0].data_source.data.device_top[{only}]"
    return f"{titles}.every(t => t.endsWith(': {whose}')) && {shown} === {bar}"


@pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_the_history_is_of_the_gpu_whose_bar_or_row_is_tapped(tmp_path: Path) -> None:
    """In a real browser; rows of the table begin with those that are not as planned."""
    with crowd_of(4) as url, browser.page(tmp_path) as tab:
        tab.size(1100, 1600)
        tab.go(url, "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].roots().length")
        tab.wait_for(f"{part(4)}.shadow_el.querySelectorAll('.slick-row').length > 3")
        at = "[v.frame.x_scale.compute(1), v.frame.y_scale.compute(v.model.y_range.end / 100)]"
        place = f"((v, r) => {at}.map((at, i) => at + [r.x, r.y][i]))(v, v.el.getBoundingClientRect())"
        browser.click(tab, *tab.evaluate(f"(v => {place})({part(1)})"))
        tab.wait_for(history("node000-1", 1))
        row = f"{part(4)}.shadow_el.querySelectorAll('.slick-row')[0].getBoundingClientRect()"
        browser.click(tab, *tab.evaluate(f"(r => [r.x + 20, r.y + 20])({row})"))
        tab.wait_for(history("node000-2", 2))


def test_it_is_read_with_400_gpus() -> None:
    with crowd_of(400) as url:
        found = page(url, "len(data['image']) > 1")
    assert len(found["data"]["name"]) == 400
    assert found["data"]["name"][:3] == ["node000-2", "node014-1", "node032-2"]  # those that are not as planned
    assert "3 of 400 workers not as planned" in found["texts"]
    assert len(found["data"]["image"][0]) == 400
