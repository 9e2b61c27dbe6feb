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

PICTURES = {"gpus-page-4.png": (4, 900), "gpus-page-400.png": (400, 850)}
SEEN_S = 60.0  # what the strips show


def main() -> None:
    """Write them all."""
    for name, (gpus, height) in PICTURES.items():
        argv = [sys.executable, str(SUPPORT / "gpu_crowd.py"), str(gpus)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
            assert crowd.stdin
            assert crowd.stdout
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home, browser.page(Path(home)) as tab:
                tab.size(1200, height)
                tab.go(crowd.stdout.readline().strip(), "window.Bokeh && Bokeh.documents.length > 0")
                time.sleep(SEEN_S)
                tab.picture(ROOT / "docs" / "pictures" / name, width=1200, height=height)
            crowd.stdin.close()


if __name__ == "__main__":
    main()
