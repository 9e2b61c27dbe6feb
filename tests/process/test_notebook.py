"""A notebook in a real JupyterLab, in a real Chromium: what people see, and whether the link leads somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from browser import BINDINGS, CLUSTER, END, EXPLAIN, FRAMES, MEMORY, REFUSED, WORK
from paths import ROOT

# As behind Open OnDemand: the server is reached by a path, and with it what jupyter-server-proxy leads to.
BASE = "/node/n7/8888/"
pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    """The notebook with all cells run."""
    folder = tmp_path_factory.mktemp("lab")
    browser.write_notebook(folder / "demo.ipynb", browser.CELLS)
    with browser.lab(folder, BASE) as url, browser.page(folder / "chromium") as page:
        page.size(1100, 3600)  # cells outside of the window are not drawn
        browser.open_notebook(page, f"{url}doc/tree/demo.ipynb")
        browser.run_cells(page, END)
        yield page


def test_what_a_notebook_shows(page: browser.Page) -> None:
    """One test: what is looked at is one notebook, which takes 15 s."""
    cluster, said = browser.shown(page, CLUSTER), [browser.shown(page, i) for i in range(END)]
    assert len(re.findall(r"/node/n7/8888/proxy/\d+/", cluster)) == 1  # the line said it, until the object did
    assert "Status: running" in cluster
    assert "Scaling" not in cluster  # it has the GPUs of this machine
    assert re.search(r"Workers: 2\s+on 2 GPUs, 1 node", cluster)
    assert str(browser.CHUNKS) in said[WORK]
    # the first cell has not been run again: its widget asks, and shows what lies where now
    page.wait_for(f"/[1-9][0-9.]+ MiB of 256/.test({browser.output(CLUSTER)}.innerText)")
    page.wait_for(f"/limit [0-9.]+ [GM]iB\\)\\s+[1-9][0-9.]* [KM]iB/.test({browser.output(CLUSTER)}.innerText)")
    for cell, words in ((MEMORY, "Numbers and moves"), (BINDINGS, "all threads are where they were planned")):
        assert said[cell].count(words) == 1
        assert said[cell].count("simulated 128.0 MiB" if cell == BINDINGS else "of 128.0 MiB (limit 102.4 MiB)") == 2
    assert cluster.count("spilling begins") == said[MEMORY].count("spilling begins") == 1
    assert page.evaluate("document.querySelectorAll('.hpcgpu').length") == 4
    for width in (1100, 800, 1100):  # nothing is cut, or has to be scrolled, once JupyterLab has laid all out
        page.size(width, 3600)
        page.wait_for("[...document.querySelectorAll('.hpcgpu')].every(e => e.scrollWidth <= e.clientWidth)")
    assert page.evaluate("document.querySelectorAll('.hpcgpu .track').length") >= 12
    refusal = said[REFUSED].strip().splitlines()
    assert refusal[0] == "line 1: LocalGPUCluster(gpu=2)"
    assert refusal[1].startswith("ConfigError: unknown option 'gpu'")
    assert "did you mean 'gpus'?" in refusal[1]
    assert len(refusal) == 3
    assert "hpcgpu/config/" in said[FRAMES]
    assert "\\n" not in said[EXPLAIN]
    assert re.search(r"gpus +sim:2x128MiB", said[EXPLAIN])
    # through jupyter-server-proxy: pages, and the document by a websocket
    link = page.evaluate(f"{browser.output(CLUSTER)}.querySelector('.hpcgpu a').href")
    assert BASE in link
    dashboard = page.another()
    dashboard.go(link, "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].roots().length")
    assert dashboard.evaluate("document.title") == "Dask: Status"
    assert dashboard.evaluate("getComputedStyle(document.querySelector('.navbar')).position") != "static"
    dashboard.close()
    browser.run_cells(page, 1)
    page.wait_for(f"{browser.output(CLUSTER)}.innerText.includes('Status: closed')")
    assert "Workers: 0" in browser.shown(page, CLUSTER)
    # the second where closing takes its time
    assert browser.shown(page, END).strip() in ("", "closing: waiting for the end of the job")


def test_chart_of_the_docs_keeps_its_letters_on_a_phone(tmp_path: Path) -> None:
    css, chart = ((ROOT / "docs" / name).as_uri() for name in ("_static/tables.css", "benchmarks/start.svg"))
    style = f"<style>img {{ max-width: 100% }}</style><link rel=stylesheet href={css}>"  # as furo has it, and ours
    (tmp_path / "page.html").write_text(f"<!doctype html>{style}<p><img src={chart}></p>")
    with browser.page(tmp_path / "chromium") as page:
        page.size(390, 800)
        page.go((tmp_path / "page.html").as_uri(), "document.querySelector('img').complete")
        assert page.evaluate("document.querySelector('img').offsetWidth") == 768
        assert page.evaluate("document.documentElement.scrollWidth") == 390  # the chart scrolls, and not the page
