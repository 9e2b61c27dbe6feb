"""The dashboard by the link of a cluster object and its secret; Dask's pages, the page of GPUs, and the metrics."""

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import urlsplit

import browser
import numpy as np
import pytest
import sockets
from bokeh.client import pull_session
from bokeh.models import ColumnDataSource, DataTable, Div, Plot
from distributed import Client
from paths import SUPPORT
from tornado.ioloop import IOLoop
from waiting import scaled, until

from hpcgpu import LocalGPUCluster, sim
from hpcgpu.deploy.dashboard.page import GpuPage
from hpcgpu.report.workers import TIERS, WorkerFacts

CROWD = SUPPORT / "gpu_crowd.py"
BASE = "/user/ada/"
WS = "Upgrade: websocket|Sec-WebSocket-Version: 13|Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==|Connection: Upgrade"
FOREIGN = "Origin: http://evil.example"
SECOND = "GET {top}/status HTTP/1.1\r\nHost: {host}\r\n{who}\r\nConnection: close\r\n\r\n"
# Of each attack: its path, below {top}, and its heads; what the port of the cluster object answers, and what a Jupyter
# does whose user's browser sends its cookie; it answers 101 before it asks the dashboard. None: the connection ends
ATTACKS: dict[str, tuple[str, str, set[int | None], set[int | None]]] = {
    "no secret": ("{top}/status", "", {404}, {404}),
    "wrong secret": ("{top}/{secret}x/status", "", {404}, {404}),
    "websocket of a foreign page": ("{top}/x/status/ws", f"{WS}|{FOREIGN}", {404}, {403}),
    "websocket of a foreign page that has the link": ("{top}/{secret}/status/ws", f"{WS}|{FOREIGN}", {101}, {403}),
    "websocket through the dashboard": (
        "{top}/{secret}/proxy/1/127.0.0.1/x",
        f"{WS}|Origin: http://{{host}}",
        {404},
        {101},
    ),
    "rebinding": ("{top}/status", "Host: evil.example", {404}, {403}),
    "rebinding to a websocket": ("{top}/x/status/ws", f"Host: evil.example|{WS}|{FOREIGN}", {404}, {403}),
    **{
        f"path {p}": (f"{{top}}{p}", "", {404}, {404})
        for p in ("/../status", "/%2e%2e/status", "//status", "/%00/status")
    },
    "absolute path": ("http://{host}{top}/{secret}/status", "", {404}, {404}),
    "path out of the page's files": ("{top}/{secret}/statics/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "", {403}, {403}),
    "path to another host": ("{top}/{secret}//evil.example/%2e%2e", "", {404}, {404}),
    "NUL": ("{top}/{secret}\0/status", "", {404}, {400}),
    "large head": ("{top}/status", "X: " + "x" * 1_000_000, {404, None}, {400, 431, None}),
    "large path": ("{top}/" + "x" * 1_000_000, "", {None}, {400, 431, None}),
    "POST": ("POST {top}/status", "Content-Length: 0", {404}, {404}),
    "POST with the secret": ("POST {top}/{secret}/status", "Content-Length: 0", {405}, {405}),
    "length and chunks": ("POST {top}/{secret}/health", "Content-Length: 9|Transfer-Encoding: chunked", {400}, {400}),
    "two lengths": ("POST {top}/{secret}/health", "Content-Length: 0|Content-Length: 9", {400}, {400}),
    "folded chunks": ("POST {top}/{secret}/health", "Content-Length: 9|Transfer-Encoding:\r\n chunked", {400}, {400}),
}


@pytest.fixture(scope="module", autouse=True)
def _loop() -> None:
    """Make the event loop of this thread, which stays."""
    IOLoop.current()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalGPUCluster]:
    """A cluster of two GPUs that hold data."""
    with LocalGPUCluster(gpus="sim:2x64MiB", quiet=True) as cluster, Client(cluster) as client:
        held = client.map(lambda i: sim.asarray(np.full(8 << 20, i, "u1")), range(16))
        assert client.gather(client.map(lambda x: int(x[0]), held)) == list(range(16))
        yield cluster


@pytest.fixture
def base(cluster: LocalGPUCluster) -> str:
    return cluster.dashboard_link.removesuffix("/status")


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=scaled(60)) as page:
            return page.status, page.read().decode(errors="replace")
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def raw(link: str, *requests: str) -> bytes:
    """Return what a connection answers to these requests, until it is closed."""
    with socket.create_connection((urlsplit(link).hostname, urlsplit(link).port), timeout=scaled(60)) as sock:
        for request in requests:
            end = "Connection: close\r\n" if request == requests[-1] else ""
            sock.sendall(f"GET {request} HTTP/1.1\r\nHost: x\r\nOrigin: http://y\r\n{end}\r\n".encode())
        if not requests:
            sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_pages_and_what_they_name_are_there(cluster: LocalGPUCluster) -> None:
    """By relative links: a proxy may put any path before them."""
    status, page = fetch(cluster.dashboard_link)
    assert status == 200
    named = [url for url in re.findall(r'(?:src|href)="([^"#:]+)"', page)]
    assert {"status", "workers", "graph", "info"} <= set(named)
    assert not [url for url in named if url.startswith("/")]
    top = cluster.dashboard_link.removesuffix("status")
    for url in ("workers", "info/main/workers.html", "", *(u for u in named if u.startswith("static"))):
        assert fetch(top + url)[0] == 200, url
    assert fetch(top.removesuffix("/"))[0] == 200
    assert fetch(top + "sitemap.json")[0] == 404  # distributed's own answers 500 and logs a traceback


def test_without_the_secret_there_is_nothing(cluster: LocalGPUCluster) -> None:
    top, secret = cluster.dashboard_link.removesuffix("/status").rsplit("/", 1)
    for path in ("/", "/status", f"/{secret}x/status", f"/{secret[:-1]}/status", f"/x/{secret}/status", "//status"):
        assert raw(top, path).startswith(b"HTTP/1.1 404"), path
    # the connection's first request opens the way; those that follow are looked at as well
    answers = raw(top, f"/{secret}/statics/css/base.css", "/status")
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"404"]
    assert raw(top) == b""
    # the port of the object and the scheduler's own say the same
    for said in (raw(top, "/status"), answers):
        assert b"It is missing here, or belongs to another cluster" in said
        assert said.endswith(b'the log of the run names: "dashboard: its address is in FILE".\n')


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A Jupyter with jupyter-server-proxy: its host and port, and the cookie of its user's browser."""
    with browser.lab(tmp_path_factory.mktemp("jupyter"), BASE, token="known-to-ada") as url:
        netloc = urlsplit(url).netloc
        until(lambda: not socket.socket().connect_ex((netloc.split(":")[0], urlsplit(url).port)), "Jupyter listens")
        with urllib.request.urlopen(f"{url}lab?token=known-to-ada", timeout=scaled(60)) as answer:
            cookies = [words.partition(";")[0] for words in answer.headers.get_all("Set-Cookie")]
        yield netloc, f"Cookie: {'; '.join(cookies)}"


def statuses(host: str, request: str) -> list[int | None]:
    """Return the statuses of all answers to these bytes; [None]: there was none."""
    out, (name, port) = b"", host.split(":")
    with socket.create_connection((name, int(port)), timeout=scaled(60)) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(request.encode("latin-1"))
        while not ("Upgrade" in request and b"\r\n\r\n" in out) and (new := sock.recv(1 << 16)):
            out += new
    assert b"root:" not in out
    assert b"evil" not in out.partition(b"\r\n\r\n")[0]  # it redirects nobody there
    return [int(found) for found in re.findall(rb"HTTP/1.1 (\d+)", out)] or [None]


@pytest.mark.parametrize("door", ["port", "notebook"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_get_nothing(cluster: LocalGPUCluster, jupyter: tuple[str, str], door: str, attack: str) -> None:
    link = urlsplit(cluster.dashboard_link)
    host, who = (link.netloc, "X: -") if door == "port" else jupyter
    top = "" if door == "port" else f"{BASE}proxy/{link.port}"
    names = {"top": top, "secret": link.path.split("/")[1], "host": host, "who": who}
    path, heads, at_the_port, in_a_notebook = ATTACKS[attack]
    lines = [path if path.startswith("POST") else f"GET {path}"]
    lines[0] += " HTTP/1.1"
    lines += ["{who}", *filter(None, heads.split("|"))]
    lines += ["Host: {host}"] * ("Host:" not in heads)
    lines += ["Connection: close"] * ("Upgrade" not in heads and "Length" not in heads)
    request = "\r\n".join([*lines, "", ""])
    smuggled = SECOND if "Length" in heads else ""
    found = statuses(host, (request + smuggled).format(**names))
    assert set(found[:1]) <= set(at_the_port if door == "port" else in_a_notebook), found
    assert 200 not in found
    assert statuses(host, SECOND.replace("/status", "/{secret}/health").format(**names)) == [200]


def test_proxy_of_a_notebook_has_the_cookie_of_its_user(cluster: LocalGPUCluster, jupyter: tuple[str, str]) -> None:
    """Of another user of the machine, or of the JupyterHub, the secret alone does not come through."""
    link, (host, who) = urlsplit(cluster.dashboard_link), jupyter
    for more, refusal in (("Connection: close", 302), (f"{WS}|Origin: http://{host}".replace("|", "\r\n"), 403)):
        request = f"GET {BASE}proxy/{link.port}{link.path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n\r\n"
        assert statuses(host, request) == [refusal]
    with socket.create_server(("127.0.0.1", 0)) as other:  # who has taken the port of a cluster that has closed
        request = f"GET {BASE}proxy/{other.getsockname()[1]}/ HTTP/1.1\r\nHost: {host}\r\n{who}\r\n\r\n"
        with socket.create_connection(tuple(host.split(":")), timeout=scaled(60)) as sock:
            sock.sendall(request.encode())
            taken, _ = other.accept()
            with taken:
                assert who.encode() in taken.recv(1 << 16)


def test_a_body_without_the_secret_takes_no_memory(cluster: LocalGPUCluster) -> None:
    """Of many connections of a neighbour, each would cost tornado's 100 MB."""
    with Client(cluster) as client:
        status = Path(f"/proc/{client.run_on_scheduler(os.getpid)}/status")
    peaks_kb = []
    for body in (b"", bytes(90_000_000)):
        head = f"POST /status HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        where = ("127.0.0.1", cluster.scheduler_info["services"]["dashboard"])
        with socket.create_connection(where, timeout=scaled(60)) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(head.encode() + body)
            assert sock.recv(100).startswith(b"HTTP/1.1 404")
        peaks_kb.append(int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]))
    assert peaks_kb[1] < peaks_kb[0] + 30_000


def test_the_links_of_objects_are_the_clusters(cluster: LocalGPUCluster) -> None:
    with Client(cluster) as client:
        assert client.dashboard_link == cluster.dashboard_link
        assert cluster.dashboard_link in client._repr_html_()
    page = cluster._repr_html_()  # by itself, without ipywidgets
    assert f'<a href="{cluster.dashboard_link}"' in page
    for words in ("Status: <strong>running</strong>", "on 2 GPUs, 1 node", "of 64.0 MiB (limit 51.2 MiB)", "simulated"):
        assert words in page
    assert repr(cluster).endswith("gpus=2)")
    assert cluster.dashboard_link.split("/")[3] not in repr(cluster) + cluster.explain() + str(cluster.get_logs())


def test_it_listens_on_loopback_as_long_as_the_cluster_lives(capfd: pytest.CaptureFixture[str]) -> None:
    """To a file the line names another file, which only its owner can read."""
    before = Counter(sockets.of(os.getpid()))
    with LocalGPUCluster(gpus="sim:1x64MiB") as cluster:
        (found,) = (Counter(sockets.of(os.getpid())) - before).elements()
        assert found in sockets.documented("process of the cluster object")
        link, said = cluster.dashboard_link, capfd.readouterr().err
        path = Path(re.search(r"hpcgpu: dashboard: its address is in (\S+)", said)[1])
        assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (f"{link}\n", 0o600)
        assert link.split("/")[3] not in said
        with Client(cluster) as client:  # what nobody has looked at has taken no time
            assert not client.run_on_scheduler(lambda: {"bokeh", "jupyter_server_proxy"} & set(sys.modules))
    assert cluster.dashboard_link == ""
    assert not path.exists()
    assert Counter(sockets.of(os.getpid())) == before


def test_there_is_no_link_without_a_dashboard(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalGPUCluster(gpus="sim:1x64MiB", dashboard=False) as cluster:
        assert cluster.dashboard_link == ""
        assert "dashboard: none" in cluster.explain()
        services = cluster.scheduler_info["services"]
        assert b"404" in (said := raw(f"http://127.0.0.1:{services['dashboard']}", "/status")).splitlines()[0]
        assert b"started with dashboard=False" in said
    assert "dashboard" not in capfd.readouterr().err


def test_routes_of_a_user_and_no_bokeh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without bokeh the page says what to install."""
    (tmp_path / "bokeh.py").write_text("raise ImportError('hidden for this test')\n")
    mine = "from distributed.http.health import HealthHandler\nroutes = [('mine', HealthHandler, {})]\n"
    (tmp_path / "mine.py").write_text(mine)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES", "['distributed.http.health', 'mine']")
    with LocalGPUCluster(gpus="sim:1x64MiB") as cluster:
        base = cluster.dashboard_link.removesuffix("status")
        pages = [fetch(f"{base}{name}") for name in ("status", "gpus")]
        assert fetch(f"{base}mine") == fetch(f"{base}health") == (200, "ok")
    assert [(status, "pip install bokeh" in text) for status, text in pages] == [(501, True)] * 2
    assert "bokeh" not in sys.modules or sys.modules["bokeh"].__file__ != str(tmp_path / "bokeh.py")


def page(url: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the content of a page of Bokeh when the condition holds for its data."""
    shown: dict[str, Any] = {}

    def holds() -> bool:
        with pull_session(first.id, url, loop) as session:
            select = session.document.select
            # of columns that several sources have, those of the table
            sources = [*select({"type": ColumnDataSource}), *(table.source for table in select({"type": DataTable}))]
            shown["data"] = {name: column for source in sources for name, column in source.data.items()}
            shown["texts"] = "\n".join(div.text for div in select({"type": Div}))
            shown["titles"] = [str(plot.title.text) for plot in select({"type": Plot})]
        return condition(shown["data"])

    with contextlib.closing(IOLoop(make_current=False)) as loop, pull_session(None, url, loop) as first:
        until(holds, f"what is awaited of {url}", every_s=1)
    return shown


def test_pages_of_gpus_show_each_gpu_over_time(base: str) -> None:
    """Ours, and Dask's own."""
    found = page(f"{base}/gpus", lambda data: sum(data["device_now"]) >= 64 << 20 and len(data["time"]) > 2)
    data = found["data"]
    assert len(data["name"]) == 2
    assert sum(sum(data[f"{tier}_now"]) for tier in TIERS) >= 128 << 20
    assert "2 GPUs on 1 node; Dask&#x27;s data: " in found["texts"]
    assert '<a href="gpus">GPUs</a>' in fetch(f"{base}/gpus")[1]  # in the menu
    found = page(f"{base}/gpu", lambda data: sum(data["memory"]) >= 64 << 20)
    assert max(found["data"]["memory"]) <= 64 << 20
    assert any(title.endswith("/ 128.00 MiB") for title in found["titles"])


def test_metrics_for_prometheus(base: str) -> None:
    def devices() -> list[float]:
        lines = fetch(f"{base}/hpcgpu/metrics")[1].splitlines()
        return [float(line.split()[-1]) for line in lines if 'tier="device"' in line]

    with urllib.request.urlopen(f"{base}/hpcgpu/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    until(lambda: 64 << 20 <= sum(devices()) <= 128 << 20, "heartbeats that say that devices are full")
    assert len(devices()) == 2
    assert fetch(f"{base.rpartition('/')[0]}/hpcgpu/metrics")[0] == 404


def test_gpu_page_marks_workers_not_as_planned() -> None:
    """Colour alone is not seen by everybody."""
    facts = [WorkerFacts(name=f"n-{i}", tiers={"device": 3 + i}, device_limit_bytes=8) for i in range(2)]
    facts[1] = replace(facts[1], differences=("2 of 9 threads may run on PUs 0",))
    page = GpuPage(SimpleNamespace(rows=AsyncMock(return_value=(facts, facts))))
    IOLoop.current().run_sync(page.update)
    first, second = page._bars.source.data["mark"]
    assert np.isnan(first)
    assert second > 4
    assert "white-space:nowrap'>n-1</span>" in page._head.text
    facts = [replace(facts[1], name=f"n-{i}", tiers={"device": i}) for i in range(400)]
    page._bars.show(facts, fresh=True)
    assert page._bars.source.data["mark"].min() > 399  # in one line, above all bars


def test_gpu_page_has_few_reasons_of_many_absent_workers() -> None:
    absent = [(f"n{i}", f"worker n{i}-{j}: killed") for i in range(400) for j in range(2)]
    absent += [(f"n{400 + i}", "its leader is lost") for i in range(9)]
    for facts in ([], [WorkerFacts(name="n-0", device_limit_bytes=8)]):
        page = GpuPage(SimpleNamespace(rows=AsyncMock(return_value=(facts, facts))), lambda: absent[::-1])
        IOLoop.current().run_sync(page.update)
        assert "809 workers not started, or lost: n408 and 8 others: its leader is lost; n399: w" in page._head.text
        assert page._head.text.count("killed") == 4
        assert "; 796 more in the log</b>" in page._head.text


def test_table_of_nodes_has_no_columns_of_workers() -> None:
    page = GpuPage(SimpleNamespace())
    page._table.show([WorkerFacts(name="n", node="n", gpu="GPU-1", model="H200")])
    shown = {each.title: each.width for each in page._table.root.columns if each.visible}
    assert ([*shown], sum(shown.values())) == (["node", "GPU", "limit", "restarts", "not as planned"], 1050)


def test_a_gpu_that_is_tapped_is_shown_over_time() -> None:
    """As a bar or as a row of the table, which begins with those that are not as planned."""
    facts = [WorkerFacts(name=f"n-{i}", tiers={"device": 3 + i}, differences=("cores",) * i) for i in range(2)]
    page = GpuPage(SimpleNamespace(rows=AsyncMock(return_value=(facts, facts))))
    IOLoop.current().run_sync(page.update)
    for source, index, name, device in (
        (page._bars.source, [1], "n-1", 4),
        (page._table.source, [1], "n-0", 3),
        (page._table.source, [], "all GPUs", 7),
    ):
        source.selected.indices = index
        assert page._lines.memory.title.text.endswith(f"over time: {name}")
        assert list(page._lines.source.data["device"]) == [device]


def test_it_is_read_with_400_gpus() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, str(CROWD), "400", "node100"], **pipes, text=True) as crowd:
        found = page(crowd.stdout.readline().strip(), lambda data: len(data["image"]) > 1)
        crowd.stdin.close()
    assert len(found["data"]["name"]) == 400
    assert found["data"]["name"][:3] == ["node000-2", "node014-1", "node032-2"]  # those that are not as planned
    assert "3 of 400 workers not as planned" in found["texts"]
    assert "1 worker not started, or lost: node100: worker node100-3: not registered" in found["texts"]
    assert len(found["data"]["image"][0]) == 400
