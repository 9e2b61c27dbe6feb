"""The dashboard through the link of a cluster object: HTTP and websockets, by the secret only, as long as it lives."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import sockets
import websocket
from distributed import Client
from waiting import scaled

from hpcgpu import LocalGPUCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalGPUCluster]:
    with LocalGPUCluster(gpus="sim:2x64MiB") as cluster:
        yield cluster


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
            sock.sendall(f"GET {request} HTTP/1.1\r\nHost: x\r\n{end}\r\n".encode())
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


def message(there: websocket.WebSocket) -> tuple[str, dict]:
    """Return type and content of Bokeh's next message."""
    header, _, content = (json.loads(there.recv()) for _ in range(3))
    for _ in range(2 * header.get("num_buffers", 0)):
        there.recv()
    return header["msgtype"], content


def test_the_bokeh_document_comes_by_a_websocket(cluster: LocalGPUCluster) -> None:
    page = fetch(cluster.dashboard_link)[1]
    token = re.search(r'"token":\s*"([^"]+)"', page)
    assert token
    address = cluster.dashboard_link.replace("http", "ws", 1) + "/ws"
    there = websocket.create_connection(address, subprotocols=["bokeh", token[1]], timeout=scaled(60))
    try:
        assert message(there)[0] == "ACK"
        for part in ({"msgid": "1", "msgtype": "PULL-DOC-REQ"}, {}, {}):
            there.send(json.dumps(part))
        while (found := message(there))[0] != "PULL-DOC-REPLY":
            assert found[0] == "PATCH-DOC"  # the plots are alive
        assert found[1]["doc"]["roots"]
    finally:
        there.close()


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
        assert said.endswith(b'the log of the run names: "dashboard: cat FILE".\n')


def test_a_clients_links_are_the_clusters(cluster: LocalGPUCluster) -> None:
    with Client(cluster) as client:
        assert client.dashboard_link == cluster.dashboard_link
        assert cluster.dashboard_link in client._repr_html_()
    assert cluster.dashboard_link.split("/")[3] not in repr(cluster) + cluster.explain() + str(cluster.get_logs())


def test_without_ipywidgets_the_html_stands_by_itself(cluster: LocalGPUCluster) -> None:
    page = cluster._repr_html_()
    assert f'<a href="{cluster.dashboard_link}"' in page
    for words in ("Status: <strong>running</strong>", "on 2 GPUs, 1 node", "of 64.0 MiB, limit 51.2 MiB", "simulated"):
        assert words in page
    assert repr(cluster).endswith("gpus=2)")


def test_it_listens_on_loopback_as_long_as_the_cluster_lives(capfd: pytest.CaptureFixture[str]) -> None:
    """To a file the line names another file, which only its owner can read."""
    before = Counter(sockets.of(os.getpid()))
    with LocalGPUCluster(gpus="sim:1x64MiB") as cluster:
        (found,) = (Counter(sockets.of(os.getpid())) - before).elements()
        assert found in sockets.documented("process of the cluster object")
        link, said = cluster.dashboard_link, capfd.readouterr().err
        path = Path(re.search(r"hpcgpu: dashboard: cat (\S+)", said)[1])
        assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == (f"{link}\n", 0o600)
        assert link.split("/")[3] not in said
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


def test_without_bokeh_the_page_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bokeh.py").write_text("raise ImportError('hidden for this test')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LocalGPUCluster(gpus="sim:1x64MiB") as cluster:
        status, said = fetch(cluster.dashboard_link)
    assert (status, "pip install 'hpcgpu[dashboard]'" in said) == (501, True)
    assert "bokeh" not in sys.modules or sys.modules["bokeh"].__file__ != str(tmp_path / "bokeh.py")
