"""Add facts to each worker's heartbeats: time with a task, bytes by tier, moves; at its start its binding.

distributed sends them (``Worker.metrics``, ``Worker.startup_information``): hpcgpu sends no messages for them.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distributed import Scheduler, Worker
from distributed.diagnostics.plugin import WorkerPlugin

from hpcgpu.errors import HpcGpuError
from hpcgpu.host import bind, discover
from hpcgpu.model import Binding, Topology, WorkerSpec
from hpcgpu.pictures.svg import render_svg
from hpcgpu.plan.binding.ports import Ports, Why, label
from hpcgpu.plan.jobs.usage import TIERS
from hpcgpu.plan.views import explain

# Their key in distributed's messages.
KEY = "hpcgpu"
# The scheduler's request for the present sums, and the answer.
ASK, ANSWER = "hpcgpu-ask", "hpcgpu-told"
_RUNNING = ("executing", "long-running")
# Reading the masks of all threads takes about 1 ms.
_READ_S = 30.0
# The answer to a request for a picture.
_ANSWER_S = 10.0


class WorkerMetrics(WorkerPlugin):
    """Measures one worker, on its event loop."""

    name = "hpcgpu-facts"

    def __init__(self, spec: WorkerSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._running: set[Any] = set()
        self._busy_s = self._since = 0.0
        self._peaks = dict.fromkeys((*TIERS, "process"), 0)
        self._last = (self._clock(), 0.0)  # when the utilisation was asked for, and the busy time then
        self._differences: tuple[float, tuple[str, ...]] = (float("-inf"), ())

    def setup(self, worker: Worker) -> None:
        """Register the facts; distributed calls this when the worker starts."""
        self._worker = worker
        worker.startup_information[KEY] = lambda _: self._fixed()
        worker.metrics[KEY] = lambda _: self._now()
        worker.stream_handlers[ASK] = lambda: worker.batched_send({"op": ANSWER, "facts": self._now()})
        worker.handlers["hpcgpu_binding"] = lambda: pickle.dumps(self._spec.binding)
        worker.handlers["hpcgpu_picture"] = self._draw
        if self._spec.simulated:
            # distributed's own names: its pages of GPUs read them
            worker.metrics["gpu_memory_used"] = lambda _: self._simulated_bytes()
            worker.metrics["gpu-memory-total"] = lambda _: self._spec.device_memory_bytes
            worker.metrics["gpu_utilization"] = lambda _: self._utilisation()

    def transition(self, key: Any, start: str, finish: str, **_: object) -> None:
        """Count the time in which a task runs; distributed calls this for each step of each task."""
        if finish in _RUNNING:
            if not self._running:
                self._since = self._clock()
            self._running.add(key)
        elif start in _RUNNING and key in self._running:
            self._running.remove(key)
            self._note_peaks()
            if not self._running:
                self._busy_s += self._clock() - self._since

    def busy_s(self) -> float:
        """Return for how long at least one task has run."""
        return self._busy_s + (self._clock() - self._since if self._running else 0.0)

    def _note_peaks(self) -> dict[str, int]:
        tiers: dict[str, int] = self._worker.data.tiers
        for tier, nbytes in tiers.items():
            self._peaks[tier] = max(self._peaks[tier], nbytes)
        return tiers

    def _now(self) -> dict[str, Any]:
        tiers = self._note_peaks()
        process = int(self._worker.monitor.get_process_memory())
        self._peaks["process"] = max(self._peaks["process"], process)
        return {
            "busy_s": self.busy_s(),
            "tiers": tiers,
            "peaks": dict(self._peaks),
            "moved": {way: count.nbytes for way, count in self._worker.data.counters.items()},
            "differences": list(self._binding_differences()),
        }

    def _fixed(self) -> dict[str, Any]:
        spec, gpu = self._spec, self._spec.gpu
        return {
            "node": socket.gethostname(),
            "gpu": gpu.uuid if gpu else "",
            "pci": gpu.pci if gpu else "",
            "model": explain.format_gpu(gpu, address=False) if gpu else "",
            "limits": _limits(spec),
            "cores": str(spec.binding.cpuset),
            "memory": explain.format_memory(spec.binding),
            "nic": explain.format_ports(spec.binding),
            "reasons": list(explain.worker_reasons(spec)),
        }

    def _binding_differences(self) -> tuple[str, ...]:
        when, differences = self._differences
        if (now := self._clock()) - when > _READ_S:
            try:
                differences = explain.differences(self._spec, replace(bind.read_binding(), env=self._spec.env))
            except HpcGpuError as e:
                differences = (str(e),)
            self._differences = (now, differences)
        return differences

    async def _draw(self, names: Sequence[str], bindings: Sequence[bytes]) -> dict[str, Any]:
        """Draw this worker's node for the page, on request."""
        loaded: list[Binding] = [pickle.loads(binding) for binding in bindings]

        def draw() -> dict[str, Any]:
            topology = discover.topology()
            if self._spec.simulated:
                gpus = {gpu.uuid: gpu for binding in loaded for gpu in binding.gpus[:1]}
                topology = replace(topology, gpus=tuple(gpus.values()))
            return draw_node(topology, names, loaded)

        return await asyncio.to_thread(draw)  # libhwloc reads the machine for about 0.1 s

    def _simulated_bytes(self) -> int:
        sim = sys.modules.get("hpcgpu.sim")
        return sim.current_gpu().used_bytes if sim else 0

    def _utilisation(self) -> int:
        """Return the percentage of the time since the last heartbeat in which a task ran."""
        now, busy_s = self._clock(), self.busy_s()
        (before, busy_before), self._last = self._last, (now, busy_s)
        return min(100, round(100 * (busy_s - busy_before) / (now - before))) if now > before else 0


def _limits(spec: WorkerSpec) -> Mapping[str, int]:
    """Return the limits in bytes; the device's size if it has no limit."""
    device = spec.device_memory_limit_bytes or spec.device_memory_bytes
    limits = {"device": device, "capacity": spec.device_memory_bytes, "process": spec.memory_limit_bytes or 0}
    return {name: nbytes for name, nbytes in limits.items() if nbytes}


def draw_node(topology: Topology, names: Sequence[str], bindings: Sequence[Binding]) -> dict[str, Any]:
    """Draw a node as SVG, with messages about its dead ports."""
    ports = Ports(topology)
    dead: dict[Why, list[str]] = {}
    for nic in ports.all:
        if not nic.active:
            dead.setdefault(ports.why_not[nic], []).append(label(nic))
    texts = [
        f"{', '.join(sorted(nics))}: {why.singular if len(nics) == 1 else why.plural}" for why, nics in dead.items()
    ]
    return {"svg": render_svg(topology, bindings, names), "dead_ports": texts}


async def ask_for_picture(scheduler: Scheduler, workers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return picture and dead ports of the node of these workers (address, name); raise OSError or TimeoutError."""
    async with asyncio.timeout(_ANSWER_S):
        bindings = await asyncio.gather(*(scheduler.rpc(address).hpcgpu_binding() for address, _ in workers))
        drawer = scheduler.rpc(workers[0][0])
        picture: dict[str, Any] = await drawer.hpcgpu_picture(names=[name for _, name in workers], bindings=bindings)
        return picture
