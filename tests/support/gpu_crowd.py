"""A scheduler process with many GPUs' workers, of which there are only the facts: ``python gpu_crowd.py 400``.

More arguments are nodes, of each of which a worker did not start.
"""

import asyncio
import random
import sys
import time
from bisect import bisect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import distributed.dashboard.scheduler as dashboard
from distributed import Scheduler
from machines import GIB, machine, pus

from hpcgpu.deploy.dashboard.usage import UsagePlugin
from hpcgpu.deploy.dashboard.worker_metrics import KEY
from hpcgpu.deploy.processes.dashboard_http import add_page
from hpcgpu.model import WorkerSpec
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.report.workers import DIRECTIONS, TIERS, planned

NODE = machine("turin-4gpu-nvml")  # four H200, four ports that are down
BINDINGS = plan_bindings(NODE, NODE.gpus, pus(NODE))
LIMIT, HOST = 112 * GIB, 64 * GIB
HEARTBEAT_S = {True: 0.5, False: 3.0}  # of ten workers at most, and of 400
WRONG = (2, 57, 130)

# When each phase of the job begins, in seconds; the data of a worker then, as part of its limit; utilisation in it.
PHASES = (
    (0.0, 0.05, 35),  # read
    (14.0, 0.60, 96),  # compute
    (32.0, 0.85, 55),  # shuffle
    (44.0, 1.55, 90),  # reduce
    (78.0, 1.35, 15),  # write
    (90.0, 0.05, 0),
)


def worker(index: int) -> SimpleNamespace:
    """What distributed keeps of a worker, as far as it is read; how much slower and larger than others it is."""
    number = index % len(BINDINGS)
    node, binding = f"node{index // len(BINDINGS):03}", BINDINGS[number]
    gpu = binding.gpus[0]
    fixed = {**planned(WorkerSpec(name="", binding=binding)), "node": node, "gpu": f"GPU-{index:08x}"}
    fixed |= {"device_limit_bytes": LIMIT, "device_capacity_bytes": gpu.memory_bytes, "host_limit_bytes": 2 * HOST}
    late_s = random.uniform(0, 3) + (12.0 if index // len(BINDINGS) % 17 == 5 else 0.0)
    size = random.gauss(1, 0.12) + (0.35 if random.random() < 0.08 else 0)
    return SimpleNamespace(name=f"{node}-{number}", extra={KEY: fixed}, metrics={}, late_s=late_s, size=size, noise=0.0)


def phase(time_s: float) -> tuple[float, int]:
    """Return the data and the utilisation of an average worker."""
    time_s %= PHASES[-1][0]
    i = bisect(PHASES, time_s, key=lambda p: p[0]) - 1
    (begin_s, before, busy), (end_s, after, _) = PHASES[i : i + 2]
    return before + (after - before) * (time_s - begin_s) / (end_s - begin_s), busy


def heartbeat(worker: SimpleNamespace, index: int, run_s: float) -> None:
    """Let it have a heartbeat; ``run_s`` is the time since the job's begin."""
    data, busy = phase(max(run_s - worker.late_s, 0.0))
    worker.noise = 0.6 * worker.noise + random.gauss(0, 0.03)
    nbytes = max(0, int((data * worker.size + worker.noise) * LIMIT))
    device = min(nbytes, int((0.97 + 0.03 * random.random()) * LIMIT))
    host = min(nbytes - device, HOST)
    disk = nbytes - device - host
    before = worker.metrics.get(KEY, {"moved": dict.fromkeys(DIRECTIONS, (0,)), "tiers": dict.fromkeys(TIERS, 0)})
    # what lies below comes up in turn, and other data goes down for it
    grown = {"host": max(0, host - before["tiers"]["host"]), "disk": max(0, disk - before["tiers"]["disk"])}
    turn = random.uniform(0.01, 0.05)
    steps = {"disk_to_host": turn * disk, "host_to_device": turn * host, "host_to_disk": grown["disk"] + turn * disk}
    steps["device_to_host"] = grown["host"] + grown["disk"] + turn * host
    moved = {way: (before["moved"][way][0] + int(steps[way]),) for way in DIRECTIONS}
    tiers = dict(zip(TIERS, (device, host, disk), strict=True))
    wrong = [f"3 of 71 threads may run on PUs 0-255, planned: {worker.extra[KEY]['cores']}"] if index in WRONG else []
    facts = {"busy_s": run_s / 2, "tiers": tiers, "peaks": tiers, "moved": moved, "differences": wrong}
    waits = random.random() < 0.15  # for another worker's data
    used = int(min(100, max(0, random.gauss(busy * (0.3 if waits else 1), 4))))
    worker.metrics = {KEY: facts, "gpu_memory_used": device + 2 * GIB, "gpu_utilization": used}


async def main(count: int, absent: Sequence[str] = ()) -> None:
    scheduler = Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0")
    UsagePlugin.attach(scheduler, None)
    reasons = [(node, f"worker {node}-3: not registered within 60 s (--death-timeout)") for node in absent]
    scheduler.handlers["hpcgpu_absent"] = lambda: reasons
    add_page(scheduler, dashboard)
    dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler)
    usage = scheduler.plugins[UsagePlugin.name]
    async with scheduler:
        begin_s = time.monotonic()
        crowd: dict[str, Any] = {f"tcp://{i}": worker(i) for i in range(count)}
        for address, fake in crowd.items():
            usage.add_worker(SimpleNamespace(workers={address: fake}), address)
            heartbeat(fake, int(address[6:]), 0.0)
        print(f"http://127.0.0.1:{scheduler.http_server.port}/gpus", flush=True)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            for index, fake in enumerate(crowd.values()):
                heartbeat(fake, index, time.monotonic() - begin_s)
            await asyncio.wait([ended], timeout=HEARTBEAT_S[count <= 10])


if __name__ == "__main__":
    random.seed(1)
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
