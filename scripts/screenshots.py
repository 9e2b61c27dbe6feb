"""Make the pictures of docs/pictures that show a notebook: a real JupyterLab in a real Chromium.

Run it where the tests run: ``.venv/bin/python scripts/screenshots.py``. It needs Chromium (``make system``) and two
minutes. Those of a batch system show a PBS that replays what a real one has answered, as the tests do; its jobs are
processes of this machine. Look at what it has made.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import browser  # noqa: E402
import camera  # noqa: E402
from pbs_replay import Pbs  # noqa: E402
from waiting import until  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SHOWN = {
    "cluster-light": browser.CLUSTER,
    "cluster-dark": browser.CLUSTER,
    "bindings-light": browser.BINDINGS,
    "refusal-light": browser.REFUSED,
    "memory-dark": browser.MEMORY,
}
QUEUE_CELLS = (
    """from hpcgpu import PBSGPUCluster

cluster = PBSGPUCluster(shape="elastic", gpus="sim:2", queue="gpu", walltime="01:00:00")""",
    "cluster.scale(6)",
    "cluster.wait_for_workers(4)",
    "cluster.jobs",
    "cluster.close()",
)
FULL = "Not Running: Insufficient amount of resource: ngpus (R: 2 A: 0 T: 8)"
WIDTH, HEIGHT, SCALE = 1040, 3600, 1.5


def take(page: browser.Page, name: str, cell: int) -> None:
    """Photograph a cell."""
    path = PICTURES / f"notebook-{name}.png"
    camera.take_element(page, path, f"document.querySelectorAll('.jp-Cell')[{cell}]")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


def change_theme(page: browser.Page, name: str) -> None:
    """Change JupyterLab's theme and wait for its end."""
    page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: '{name}'}}).then(() => 1)")
    page.wait_for(f"document.body.dataset.jpThemeName === '{name}' && !document.getElementById('jupyterlab-splash')")
    page.wait_for("document.getAnimations().length === 0")


def on_one_machine(folder: Path) -> None:
    """Make those of a LocalGPUCluster."""
    browser.write_notebook(folder / "demo.ipynb", browser.CELLS)
    with browser.lab(folder) as url, browser.page(folder / "chromium") as page:
        page.size(WIDTH, HEIGHT, SCALE)
        browser.open_notebook(page, f"{url}doc/tree/demo.ipynb")
        browser.run_cells(page, browser.END)
        page.wait_for(f"/of [0-9.]+ [GM]iB\\s+[1-9][0-9.]* [KM]iB/.test({browser.output(browser.CLUSTER)}.innerText)")
        for name, cell in SHOWN.items():
            change_theme(page, THEMES[name.rpartition("-")[2]])
            take(page, name, cell)
        browser.run_cells(page, 1)


def in_a_queue(folder: Path) -> None:
    """Make those of a PBSGPUCluster: while it waits, and its jobs."""
    pbs = Pbs(folder / "pbs", "head")
    pbs.install(folder / "bin")
    pbs.auto(False)
    os.environ["PATH"] = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    browser.write_notebook(folder / "queue.ipynb", QUEUE_CELLS)
    with browser.lab(folder) as url, browser.page(folder / "chromium") as page:
        page.size(WIDTH, HEIGHT, SCALE)
        browser.open_notebook(page, f"{url}doc/tree/queue.ipynb")
        page.evaluate("void jupyterapp.commands.execute('notebook:run-cell-and-select-next')")  # no wait
        until(lambda: pbs.ids() and pbs.get(pbs.ids()[0], "state"), "the job is submitted")
        pbs.say(pbs.ids()[0], "Q", FULL)
        page.wait_for(f"/Insufficient.*\\[1[0-9] s\\]/.test({browser.output(0)}.innerText)")
        take(page, "waiting-light", 0)
        pbs.start(pbs.ids()[0])
        browser.run_cells(page, 1)
        until(lambda: len(pbs.ids()) == 3, "more jobs are submitted")
        pbs.start(pbs.ids()[1])
        pbs.say(pbs.ids()[2], "Q", FULL)
        browser.run_cells(page, 2)
        take(page, "jobs-light", 3)
        browser.run_cells(page, 1)


def main() -> int:
    """Make them."""
    if browser.CHROMIUM is None:
        print("there is no Chromium: make system", file=sys.stderr)
        return 1
    for make in (on_one_machine, in_a_queue):
        with tempfile.TemporaryDirectory(prefix="notebooks-", ignore_cleanup_errors=True) as made:
            make(Path(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
