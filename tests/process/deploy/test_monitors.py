"""Simulated device memory is host memory to the kernel: the memory monitors and the division leave it out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ranks

# Fills the simulated GPU (400 MiB, in a worker whose memory_limit is 250 MB) and lets the monitors look at it.
FILL = """
    import json, pathlib
    from hpcgpu import sim
    c = Client()
    pid = c.run(os.getpid)

    def fill(dask_worker):
        import numpy as np
        gpu = sim.current_gpu()
        dask_worker.kept = [gpu.asarray(np.ones(50 << 20, "u1")) for _ in range(8)]
        return gpu.used_bytes, dask_worker.monitor.proc.memory_info().rss, dask_worker.monitor.get_process_memory()

    used, rss, measured = next(iter(c.run(fill).values()))

    async def look(dask_worker):
        import asyncio
        for _ in range(20):  # the monitors look every 100 ms
            await asyncio.sleep(0.1)
            dask_worker.memory_manager.memory_monitor and await dask_worker.memory_manager.memory_monitor(dask_worker)
        return dask_worker.status.name

    status = next(iter(c.run(look).values()))
    facts = dict(used=used, rss=rss, measured=measured, status=status, same=c.run(os.getpid) == pid,
                 limit=next(iter(c.scheduler_info()["workers"].values()))["memory_limit"])
    pathlib.Path(sys.argv[1]).write_text(json.dumps(facts))
"""


def test_a_full_simulated_gpu_neither_pauses_nor_terminates(tmp_path: Path) -> None:
    path = ranks.script(tmp_path, FILL)
    done = ranks.run(path, str(tmp_path / "facts"), options=("--gpus", "sim:1x450MiB", "--memory-limit", "250MB"))
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "facts").read_text())
    assert facts["used"] == 400 << 20
    assert facts["rss"] > facts["limit"] > facts["measured"] > 0
    assert (facts["status"], facts["same"]) == ("running", True)
    assert not re.search("Pausing|Restarting|memory budget", done.stderr)


def test_a_host_full_of_memory_is_still_terminated(tmp_path: Path) -> None:
    code = """
        import queue
        c, news = Client(), queue.Queue()
        before = list(c.scheduler_info()["workers"])
        c.subscribe_topic("all", lambda event: news.put(event[1]))
        f = c.submit(lambda: (bytearray(400 << 20), time.sleep(60)), retries=0)
        while (event := news.get())["action"] != "add-worker":
            continue
        print("another worker" if event["worker"] not in before else "the same")
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:1x64MiB", "--memory-limit", "300MB"))
    assert done.stdout == "another worker\n", done.stderr
    assert "exceeded 95% memory budget" in done.stderr


def test_the_division_leaves_simulated_memory_out(tmp_path: Path) -> None:
    code = """
        import psutil
        c = Client()
        limits = [w["memory_limit"] for w in c.scheduler_info()["workers"].values()]
        print(sum(limits) <= psutil.virtual_memory().total - 2 * (1 << 30), min(limits) > 0)
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:2x1GiB"))
    assert done.stdout == "True True\n", done.stderr
