"""A scheduler process with many GPUs' workers, of which there are only the facts: ``python gpu_crowd.py 400 [seed]``.

The dashboard is real, and so is what it reads; each fake worker's heartbeat comes every three seconds, as that of one
of 400 does. It prints the address of the page, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import distributed.dashboard.scheduler as dashboard
from distributed import Scheduler

from hpcgpu.deploy.dashboard import pages
from hpcgpu.deploy.dashboard.ledger import Ledger
from hpcgpu.deploy.dashboard.worker_facts import KEY
from hpcgpu.plan.jobs.usage import DIRECTIONS, TIERS

GIB = 1 << 30
PER_NODE, LIMIT = 4, 64 * GIB
HEARTBEAT_S = {True: 0.5, False: 3.0}  # of ten workers at most, and of 400


def worker(index: int) -> SimpleNamespace:
    """What distributed keeps of a worker, as far as it is read."""
    node, number = f"node{index // PER_NODE:03}", index % PER_NODE
    fixed = {
        "node": node,
        "gpu": f"GPU-{index:08x}",
        "pci": f"0000:{number + 1:02x}:00.0",
        "model": "NVIDIA A100-SXM4-80GB 80.0 GiB",
        "limits": {"device": LIMIT, "capacity": 80 * GIB, "process": 120 * GIB},
        "cores": f"{16 * number}-{16 * number + 15}",
        "memory": f"{number} preferred-many",
        "nic": f"mlx5_{number}:1 (ib{number})",
        "reasons": ["mlx5_1 is nearest but its port is down → mlx5_2"] if index == 5 else [],
    }
    return SimpleNamespace(
        name=f"{node}-{number}", extra={KEY: fixed}, metrics={}, phase=0.8 * (index // 4 % 7) + 0.3 * random.random()
    )


def heartbeat(one: SimpleNamespace, index: int, time_s: float) -> None:
    """Let it have a heartbeat: its data grows and is spilled, in waves."""
    wave = 0.55 + 0.45 * math.sin(time_s / 12 + one.phase)
    device = int(wave * LIMIT)
    host = int(max(0.0, wave - 0.6) * 90 * GIB)
    before = one.metrics.get(KEY, {}).get("moved", {})
    step = {"device_to_host": host // 20, "host_to_device": host // 30}
    moved = {way: before.get(way, 0) + step.get(way, 0) for way in DIRECTIONS}
    tiers = dict(zip(TIERS, (device, host, host // 4 if index % 9 == 0 else 0), strict=True))
    wrong = ["3 of 71 threads may run on PUs 0-63, planned: 16-31"] if index in (2, 57, 130) else []
    facts = {"busy_s": time_s / 2, "tiers": tiers, "peaks": tiers, "moved": moved, "differences": wrong}
    used = device + 2 * GIB
    one.metrics = {
        KEY: facts,
        "gpu_memory_used": used,
        "gpu_utilization": int(55 + 44 * math.sin(time_s / 5 + index // 40)),
    }


async def main(count: int) -> None:
    scheduler = Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0")
    Ledger.attach(scheduler, None)
    pages.add_metrics(scheduler)
    pages.add_page(scheduler, dashboard)
    dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler)
    ledger = scheduler.plugins[Ledger.name]
    async with scheduler:
        crowd: dict[str, Any] = {f"tcp://{i}": worker(i) for i in range(count)}
        for address, one in crowd.items():
            ledger.add_worker(SimpleNamespace(workers={address: one}), address)
            heartbeat(one, int(address[6:]), time.time())
        print(f"http://127.0.0.1:{scheduler.http_server.port}/gpus", flush=True)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            for index, one in enumerate(crowd.values()):
                heartbeat(one, index, time.time())
            await asyncio.wait([ended], timeout=HEARTBEAT_S[count <= 10])


if __name__ == "__main__":
    random.seed(1)
    asyncio.run(main(int(sys.argv[1])))
