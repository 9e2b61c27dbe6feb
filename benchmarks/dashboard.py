"""The page "GPUs" with 400 GPUs: the part of the scheduler's core that it takes while a browser has it open.

The dashboard is real; of the workers there are only the heartbeats' facts (``tests/support/gpu_crowd.py``). A client
of Bokeh holds the page open and reads all that it is sent. The process is measured without the page, with it, and
without it again, in each run; what the page takes is the difference. One JSON line per figure: the
median of ``--runs``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import _figures
import psutil
from bokeh.client import pull_session

CROWD = Path(__file__).parents[1] / "tests" / "support" / "gpu_crowd.py"
SECONDS, EACH_S = 15.0, 0.015  # three updates of the page: 4,000 GPUs have one in 20 s


def cpu_share(process: psutil.Process, seconds: float, page: object = None) -> float:
    """Return the part of a core that the process takes, in percent, over some seconds."""
    before, begin = process.cpu_times(), time.monotonic()
    while time.monotonic() < begin + seconds:
        time.sleep(1)
        if page is not None:
            page.force_roundtrip()
    after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / (time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=400)
    options = parser.parse_args()
    seconds = max(SECONDS, EACH_S * options.gpus)
    found: dict[str, list[float]] = {"while open": [], "after it was closed": []}
    argv = [sys.executable, str(CROWD), str(options.gpus)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as crowd:
        assert crowd.stdout
        url, process = crowd.stdout.readline().decode().strip(), psutil.Process(crowd.pid)
        pull_session(url=url).close()  # bokeh is imported once
        for _ in range(options.runs):
            without = cpu_share(process, seconds)
            page = pull_session(url=url)
            page.force_roundtrip()
            found["while open"].append(cpu_share(process, seconds, page) - without)
            page.close()
            time.sleep(20)  # Bokeh keeps a session for 15 s, in case that the browser comes back
            found["after it was closed"].append(cpu_share(process, seconds) - without)
        assert crowd.stdin
        crowd.stdin.close()
    for what, values in found.items():
        case = f"page of {options.gpus} GPUs"
        _figures.report("dashboard", case, "hpcgpu", f"scheduler, {what}", values, "% of a core")


if __name__ == "__main__":
    main()
