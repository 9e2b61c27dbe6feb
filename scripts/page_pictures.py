"""Photograph the dashboard's page of GPUs for docs/pictures, with 4 GPUs and with 400; it needs Chromium."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
import browser  # noqa: E402
import camera  # noqa: E402

_END = "Bokeh.index.find_one(Bokeh.documents[0].roots()[0].children.at(-1)).el.getBoundingClientRect().bottom"
PICTURES = {"gpus-page-4.png": 4, "gpus-page-400.png": 400}
SEEN_S = 60.0  # what the strips show: to the middle of a phase in which data lies on all tiers
WIDTH, HEIGHT, SCALE = 1100, 2600, 1.5  # higher than the page


def main() -> None:
    """Write them all."""
    for name, gpus in PICTURES.items():
        argv = [sys.executable, str(SUPPORT / "gpu_crowd.py"), str(gpus)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
            assert crowd.stdin
            assert crowd.stdout
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, browser.page(Path(home)) as tab:
                tab.size(WIDTH, HEIGHT, SCALE)
                tab.go(crowd.stdout.readline().strip(), "window.Bokeh && Bokeh.documents.length > 0")
                time.sleep(SEEN_S)
                path = ROOT / "docs" / "pictures" / name
                camera.take_whole(tab, path, _END)
            crowd.stdin.close()


if __name__ == "__main__":
    main()
