"""A gang and elastic jobs of 32 nodes with four workers each on this machine, which lose eight nodes: what it takes.

PBS is ``tests/support/pbs_replay.py``, and the nodes are ``tests/support/many_nodes.py``'s: real processes of all
ranks, workers and jobs, as root. One JSON line per figure; an assertion fails where something is wrong or left.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
import threading
from pathlib import Path

import _figures
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import ranks
from leaks import processes
from many_nodes import Trial
from pbs_replay import Pbs
from waiting import until

EACH, LOST_OF, TASKS = 4, 4, 10_000
MIB = 1 << 20
report = functools.partial(_figures.report, "gang")


def run(shape: str, nodes: int) -> None:
    """Report one trial; no process may be left that knows its folder."""
    who = f"{shape}, {nodes} nodes with {EACH} workers each"
    with tempfile.TemporaryDirectory(prefix="gang-") as folder:
        home = Path(folder)
        pbs = Pbs(home / "pbs", "release")
        pbs.install(home / "bin")
        os.environ.update(HOME=folder, PATH=f"{home}/bin:{ranks.BIN}:{os.environ['PATH']}")
        os.chdir(home)
        trial = Trial(pbs, home, nodes, EACH, nodes // LOST_OF, TASKS, many=True)
        free_bytes, least_bytes, over = psutil.virtual_memory().available, [], threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                least_bytes[:] = [min([psutil.virtual_memory().available, *least_bytes])]

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            getattr(trial, shape)()
        finally:
            over.set()
            watching.join()
        until(lambda: not processes([home]), "no process is left", limit_s=60)
        for mom in pbs.moms:
            mom.wait()
        os.chdir("/")
    for step, seconds in trial.took_s.items():
        report(step, who, "wall_s", [seconds], "s")
    report("memory that went at most", who, "mib", [(free_bytes - least_bytes[0]) / MIB], "MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--shapes", default="gang,elastic")
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        run(shape, options.nodes)


if __name__ == "__main__":
    main()
