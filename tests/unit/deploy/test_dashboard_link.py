"""The form of the dashboard's link: on this machine, behind the proxies of notebooks, as the user's template says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import dask
import pytest

from hpcgpu.deploy.network.dashboard import Forwarder, far_hint, link

HERE, SECRET = "http://127.0.0.1:4000/SECRET/status", "proxy/4000/SECRET/status"


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, HERE),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}, f"/user/ada/{SECRET}"),
        ({"JUPYTERHUB_SERVICE_PREFIX": "/hub/user/ada/lab-2/"}, f"/hub/user/ada/lab-2/{SECRET}"),
    ],
)
def test_link_here_and_behind_jupyterhub(environ: dict[str, str], address: str) -> None:
    assert link(4000, "SECRET", environ) == address


@pytest.mark.parametrize("base", ["/node/n7/8888/", "/rnode/n7/8888/", "/"])
def test_link_behind_open_ondemand(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "jpserver-77.json").write_text(json.dumps({"base_url": base, "pid": 77}))
    assert link(4000, "SECRET", {"JPY_PARENT_PID": "77"}) == (HERE if base == "/" else f"{base}{SECRET}")
    assert link(4000, "SECRET", {"JPY_PARENT_PID": "78"}) == HERE


def test_dasks_own_template_is_the_users_word() -> None:
    template = "https://hub.example/user/{ME}/proxy/{port}/status"
    with dask.config.set({"distributed.dashboard.link": template}), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ME", "ada")
        found = link(4000, "SECRET", {"JUPYTERHUB_SERVICE_PREFIX": "/user/eve/"})
    assert found == "https://hub.example/user/ada/proxy/4000/SECRET/status"


def test_only_who_came_by_ssh_is_told_of_ssh() -> None:
    assert "ssh -N -L 4000:127.0.0.1:4000 login2" in far_hint(4000, {"SSH_CONNECTION": "1 2 3 4"}, "login2")
    assert far_hint(4000, {}, "laptop") == ""
    assert far_hint(4000, {"SSH_CONNECTION": "1 2 3 4", "JPY_PARENT_PID": "7"}, "login2") == ""


def test_no_way_to_the_scheduler_is_said_in_the_browser() -> None:
    async def use() -> bytes:
        async def connect() -> object:
            raise OSError("gone")

        forwarder = await Forwarder.open(connect, lambda: "SECRET")
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(b"GET /SECRET/status HTTP/1.1\r\n\r\n")
        said = await reader.read()
        writer.close()
        forwarder.close()
        return said

    said = asyncio.run(use())
    assert said.startswith(b"HTTP/1.1 502")
    assert b"The scheduler does not answer: gone" in said


def test_neighbours_who_only_connect_are_limited() -> None:
    """One more than may wait is turned away at once; who goes makes room."""

    async def use() -> bytes:
        async def connect() -> object:
            raise OSError("gone")

        forwarder = await Forwarder.open(connect, lambda: "SECRET")
        silent = [await asyncio.open_connection("127.0.0.1", forwarder.port) for _ in range(64)]
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        said = await reader.read()
        for _, other in (*silent, (reader, writer)):
            other.close()
        await asyncio.gather(*(r.read() for r, _ in silent))
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        forwarder.close()
        return said + answer

    assert asyncio.run(use()).startswith(b"HTTP/1.1 404")
