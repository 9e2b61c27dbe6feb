"""Programs that templates start, with Jupyter and Dask as they are."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import websocket
from paths import ROOT
from waiting import scaled, until

HPCGPU = Path(sys.executable).with_name("hpcgpu")
CELL = """
from distributed import Client
client = Client()
print(len(client.scheduler_info(n_workers=-1)["workers"]), client.submit(sum, [1, 2]).result())
"""


def listens(base: str) -> bool:
    url = urllib.parse.urlsplit(base)
    with socket.socket() as tried:
        return tried.connect_ex((url.hostname, url.port)) == 0


def request(base: str, token: str, path: str, data: bytes | None = None) -> bytes:
    headers = {"Authorization": f"token {token}"}
    with urllib.request.urlopen(urllib.request.Request(base + path, data, headers), timeout=scaled(30)) as answer:
        return answer.read()


def run_cell(base: str, token: str, code: str) -> str:
    """Return what a cell prints in a new kernel."""
    kernel = json.loads(request(base, token, "api/kernels", b"{}"))["id"]
    channels = f"{base.replace('http', 'ws', 1)}api/kernels/{kernel}/channels"
    header = {"msg_id": "1", "msg_type": "execute_request", "username": "", "session": "1", "version": "5.3"}
    message = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "content": {"code": code}}
    channel = websocket.create_connection(channels, timeout=scaled(60), header=[f"Authorization: token {token}"])
    try:
        channel.send(json.dumps(message))
        while True:
            said = json.loads(channel.recv())
            if said["msg_type"] == "error":
                pytest.fail("\n".join(said["content"]["traceback"]))
            if said["msg_type"] == "stream":
                return said["content"]["text"]
    finally:
        channel.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The notebook server as the script of a cluster."""
    argv = [HPCGPU, "run", "--gpus", "sim:2", ROOT / "jobscripts" / "notebook_server.py", "--allow-root"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as made:
        try:
            yield made
        finally:
            made.kill()


def test_a_notebook_is_a_client_of_the_cluster(server: subprocess.Popen[str]) -> None:
    """``lab/test_in_a_job.py`` has one that is shut down."""
    said = ""
    while "is running at" not in said:
        said += server.stderr.readline() or pytest.fail(f"it has ended: {said}")
    (path,) = re.findall(r"its address: cat (\S+)", said)
    address = Path(path)
    assert address.stat().st_mode & 0o777 == 0o600
    base, _, token = address.read_text().strip().partition("?token=")
    until(lambda: listens(base), "Jupyter listens, which it says before it does", limit_s=30)
    assert run_cell(base, token, CELL) == "2 3\n"
    server.send_signal(signal.SIGTERM)
    _, rest = server.communicate(timeout=scaled(60))
    assert server.returncode == 143, rest
    assert token not in said + rest
    assert not address.exists()


def test_a_python_without_jupyter_says_what_to_install() -> None:
    program = ROOT / "jobscripts" / "notebook_server.py"
    code = f"import sys, runpy; sys.path = [p for p in sys.path if 'site-packages' not in p] + [{str(ROOT)!r}]; "
    code += f"sys.argv[1:] = []; runpy.run_path({str(program)!r}, run_name='__main__')"
    done = ranks.run_command([sys.executable, "-c", code])
    assert done.returncode == 2, done.stderr
    assert "pip install jupyterlab" in done.stderr
