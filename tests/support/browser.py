"""A real Chromium without a window, by its DevTools protocol, and a JupyterLab for it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
import websocket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PATIENCE_S = 100
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--no-proxy-server"),
)

CLUSTER, WORK, MEMORY, BINDINGS, REFUSED, FRAMES, EXPLAIN, END = range(8)
CHUNKS = 104  # of 8 MiB: more than fits on two devices of 128 MiB, and than stays in host memory
# The notebook of the test, and of the pictures in the documentation.
CELLS = (
    """
from distributed import Client, wait
from hpcgpu import LocalGPUCluster

cluster = LocalGPUCluster(gpus="sim:2x128MiB", memory_limit="400MB")
client = Client(cluster)
cluster""",
    """
import numpy as np
from hpcgpu import sim

futures = client.map(lambda i: sim.asarray(np.full(8 << 20, i, "u1")), range(104))
len(wait(futures).done)""",
    "cluster.memory()",
    "cluster.bindings()",
    "LocalGPUCluster(gpu=2)",
    "import traceback; traceback.print_last()",
    "cluster.explain()",
    "client.close(); cluster.close()",
)


class Page:
    """One page of a browser."""

    def __init__(self, address: str) -> None:
        self._browser = address.split("/")[2]
        self._socket = websocket.create_connection(address, timeout=_PATIENCE_S, suppress_origin=True)
        self._numbers = itertools.count(1)

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, of a promise when it is kept."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Return the value of an expression as soon as it is true."""
        look = f"const t = setInterval(() => {{ const v = {condition}; if (v) {{ clearInterval(t); kept(v) }} }}, 150)"
        return self.evaluate(f"new Promise(kept => {{ {look} }})")

    def go(self, url: str, until: str) -> None:
        """Open an address, and wait until an expression is true there."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href !== 'about:blank' && document.readyState === 'complete' && ({until})")

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Set the window's size, and how many pixels of a picture one of its pixels is."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.call("Emulation.setDeviceMetricsOverride", **metrics, mobile=False)

    def another(self) -> Page:
        """Open one more page."""
        request = urllib.request.Request(f"http://{self._browser}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return Page(json.load(answer)["webSocketDebuggerUrl"])

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    """Start a browser with its files in this folder."""
    assert CHROMIUM
    argv = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as short:  # a socket's path has 107 bytes at most
        browser, line = _started(argv, "DevTools listening on", {"HOME": str(folder), "TMPDIR": short})
        try:
            address = line.split()[-1]
            with urllib.request.urlopen(f"http://{address.split('/')[2]}/json/list", timeout=_PATIENCE_S) as answer:
                target = next(target for target in json.load(answer) if target["type"] == "page")
            opened = Page(target["webSocketDebuggerUrl"])
            opened.size(1100, 800)
            yield opened
            opened.close()
        finally:
            _end(browser)


def _started(argv: Sequence[str], word: str, env: dict[str, str]) -> tuple[subprocess.Popen[str], str]:
    """Start a program; return it with the line on stderr that has the word."""
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    process = subprocess.Popen(argv, **pipes, env={**os.environ, **env})
    lines = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()  # more must not fill the pipe
            return process, line
    raise RuntimeError(f"{argv[0]} ended with {process.wait(30)}: {''.join(lines)}")


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def lab(folder: Path, base_url: str = "/", token: str = "") -> Iterator[str]:
    """Start JupyterLab in this folder; yield its address."""
    argv = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0", "--ServerApp.port_retries=0"),
        *("--ip=127.0.0.1", f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True"),
        *(f"--ServerApp.base_url={base_url}", f"--ServerApp.root_dir={folder}"),
    ]
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    no_news = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(no_news))
    private = {name: str(folder / name.lower()) for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    private |= {"JUPYTER_DATA_DIR": str(folder / "data"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    server, line = _started(argv, "http://127.0.0.1", {**private, "HOME": str(folder)})
    try:
        yield line.split()[-1].partition("lab")[0]
    finally:
        _end(server)


def write_notebook(path: Path, cells: Sequence[str]) -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = [nbformat.v4.new_code_cell(source.strip()) for source in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}), path)


def open_notebook(page: Page, url: str) -> None:
    """Open a notebook, and wait until its kernel is there."""
    page.go(url, "window.jupyterapp && document.querySelector('.jp-Notebook .jp-Cell')")
    kernels = "[...jupyterapp.shell.widgets('main')].map(w => w.sessionContext?.session?.kernel?.status)"
    page.wait_for(f"{kernels}.includes('idle')")


def run_cells(page: Page, count: int) -> None:
    """Run the next cells, one after the other; errors end none of them."""
    for _ in range(count):
        page.evaluate("jupyterapp.commands.execute('notebook:run-cell-and-select-next').then(() => 1)")


def shown(page: Page, cell: int) -> str:
    """Return what a cell's outputs show, as text."""
    return str(page.evaluate(f"{output(cell)}.innerText"))


def output(cell: int) -> str:
    """Return an expression for the outputs of a cell."""
    return f"document.querySelectorAll('.jp-Cell')[{cell}].querySelector('.jp-OutputArea')"
