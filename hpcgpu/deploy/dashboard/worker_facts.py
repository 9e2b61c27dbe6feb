"""Add facts to each worker's heartbeats: time with a task, bytes by tier, moves; at its start its binding.

distributed sends them (``Worker.metrics``, ``Worker.startup_information``): hpcgpu sends no messages for them.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from hpcgpu.deploy.dashboard import node_picture
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import bind
from hpcgpu.model import WorkerSpec
from hpcgpu.plan.jobs.usage import TIERS
from hpcgpu.plan.views import explain

# Their key in distributed's messages.
KEY = "hpcgpu"
# The scheduler's request for the present sums, and the answer.
ASK, TOLD = "hpcgpu-ask", "hpcgpu-told"
_RUNNING = ("executing", "long-running")
# Reading the masks of all threads takes about 1 ms.
_LOOK_S = 30.0


class WorkerFacts(WorkerPlugin):
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
        worker.stream_handlers[ASK] = lambda: worker.batched_send({"op": TOLD, "facts": self._now()})
        node_picture.serve(worker, self._spec)
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
        when, found = self._differences
        if (now := self._clock()) - when > _LOOK_S:
            try:
                found = explain.differences(self._spec, replace(bind.read_binding(), env=self._spec.env))
            except HpcGpuError as e:
                found = (str(e),)
            self._differences = (now, found)
        return found

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
    return {what: nbytes for what, nbytes in limits.items() if nbytes}
