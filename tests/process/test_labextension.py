"""dask-labextension's panel in a real JupyterLab: a cluster of its own is started, scaled, looked at and stopped."""

import contextlib
import json
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import browser
import pytest
from pbs_replay import Pbs
from waiting import scaled, until

BASE = "/user/ada/"
CLUSTER = ".dask-ClusterListingItem"
ITEM = f"document.querySelector('{CLUSTER}')"
PANE = "document.querySelector('.dask-DashboardItem iframe, iframe')?.contentWindow"
TWO_WORKERS = "m => m.columns?.().includes('nthreads') && m.get_length() === 3"  # of the page's table: and their sum
ENTER = """(input, text) => {
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(input, text)  // React looks there
    input.dispatchEvent(new Event('input', {bubbles: true}))
}"""
pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


def answer(url: str, token: str = "") -> int:
    """Return the status of an answer; no redirection is followed."""
    where = urlsplit(url)
    with contextlib.closing(HTTPConnection(where.netloc, timeout=scaled(60))) as server:
        server.request("GET", where.path, headers={"Authorization": f"token {token}"} if token else {})
        return server.getresponse().status


def click(page: browser.Page, selector: str) -> None:
    page.wait_for(f"!!document.querySelector('{selector}')")
    page.evaluate(f"document.querySelector('{selector}').click()")


@pytest.mark.parametrize("build", ["head"])
def test_cluster_of_the_panel_is_started_scaled_seen_and_stopped(
    pbs: Pbs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"gpus": "sim:1x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
    for name, value in {"MODULE": "hpcgpu", "CLASS": "PBSGPUCluster", "KWARGS": json.dumps(options)}.items():
        monkeypatch.setenv(f"DASK_LABEXTENSION__FACTORY__{name}", value)
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", BASE)  # its link would be a path of the hub, whose port is another
    (folder := tmp_path / "lab").mkdir()
    with browser.lab(folder, BASE, token="known-to-ada") as url, browser.page(tmp_path / "chromium") as page:
        page.size(1300, 900)
        page.go(
            f"{url}lab?token=known-to-ada",
            "window.jupyterapp && !!document.querySelector('[data-id=dask-dashboard-launcher]')",
        )
        page.evaluate("jupyterapp.restored.then(() => jupyterapp.shell.activateById('dask-dashboard-launcher'))")
        click(page, '[data-command="dask:launch-cluster"]')
        page.wait_for(f"{ITEM}?.innerText.includes('Workers: 0')")
        link = page.evaluate(f"{ITEM}.querySelector('a').href")
        # panes: by the extension's own proxy, which has dropped the path of the link, and by its websocket
        click(page, 'button[value="Workers"]')
        page.wait_for(f"{PANE}?.Bokeh?.documents[0]?.roots().length")
        click(page, f"{CLUSTER}-scale")
        page.wait_for("!!document.querySelector('.jp-Dialog input')")
        page.evaluate(f"({ENTER})(document.querySelector('.jp-Dialog input'), '2')")
        click(page, ".jp-Dialog .jp-mod-accept")
        page.wait_for(f"{ITEM}.innerText.includes('Workers: 2')")
        page.wait_for(f"[...{PANE}.Bokeh.documents[0]._all_models.values()].some({TWO_WORKERS})")
        # from any other process the secret alone counts, and Jupyter's token at its proxies
        port = urlsplit(link).port
        assert answer(link) == 200
        without = f"http://127.0.0.1:{port}/status"
        proxied = [f"{url}proxy/{port}/status", page.evaluate(f"{PANE}.location.href")]
        assert [answer(address) for address in (without, *proxied)] == [404, 302, 302]
        assert [answer(address, "known-to-ada") for address in proxied] == [200, 200]
        click(page, f"{CLUSTER}-stop")
        page.wait_for(f"!{ITEM}")
        until(lambda: all(map(pbs.over, pbs.ids())), "all jobs have ended")
