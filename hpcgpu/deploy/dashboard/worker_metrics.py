"""A worker's facts, collected in its process: for each heartbeat, and where people ask.

They go with distributed's heartbeats (``Worker.metrics``, ``Worker.startup_information``) as sums that the workers
keep; the scheduler reads them when a worker leaves, and on request.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distributed import Worker
from distributed.diagnostics import nvml
from distributed.diagnostics.plugin import WorkerPlugin

from hpcgpu.errors import HpcGpuError, LaunchError
from hpcgpu.host import cuda_driver, host_memory, kernel_binding, log
from hpcgpu.host.energy import CpuEnergy, GpuEnergy
from hpcgpu.model import WorkerSpec
from hpcgpu.report.machine import binding_differences
from hpcgpu.report.workers import TIERS, WorkerFacts, planned, read_facts

KEY = "hpcgpu"  # their key in distributed's messages
# The scheduler's request for the present sums, and the answer.
ASK, ANSWER = "hpcgpu-ask", "hpcgpu-told"
_RUNNING = ("executing", "long-running")
_READ_S = 30.0  # reading the masks of all threads takes about 1 ms


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
        self._gpu_energy = GpuEnergy(spec.gpu.pci, clock) if spec.gpu and not spec.simulated else None
        self._cpu_energy = CpuEnergy()
        self._energy_last = (self._clock(), 0.0, 0.0)  # when it was read, the busy time then, and the joules
        self._busy_energy_j = 0.0

    def setup(self, worker: Worker) -> None:
        """Register the facts; distributed calls this when the worker starts."""
        self._worker = worker
        worker.startup_information[KEY] = lambda _: {"node": socket.gethostname(), **planned(self._spec)}
        worker.metrics[KEY] = lambda _: self._now()
        worker.stream_handlers[ASK] = lambda: worker.batched_send({"op": ANSWER, "facts": self._now()})
        if self._spec.simulated:
            # distributed's own names: its pages of GPUs read them
            worker.metrics["gpu_memory_used"] = lambda _: _read_device(self._spec)["device_used_bytes"]
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

    def _note_peaks(self, process_bytes: int = 0) -> None:
        for tier, nbytes in {**self._worker.data.tiers, "process": process_bytes}.items():
            self._peaks[tier] = max(self._peaks[tier], nbytes)

    def _now(self) -> dict[str, Any]:
        memory = _read_memory(self._worker)
        self._note_peaks(memory["process_bytes"])
        use = {"busy_s": self.busy_s(), "peaks": dict(self._peaks)}
        return {**memory, **use, **self._energy(), "differences": list(self._binding_differences())}

    def _energy(self) -> dict[str, float | None]:
        """Return what GPU and CPUs have used; between two reads the GPU's power counts as constant."""
        now, busy_s = self._clock(), self.busy_s()
        joules = self._gpu_energy.read() if self._gpu_energy else None
        if joules is not None:
            (before, busy_before, joules_before), self._energy_last = self._energy_last, (now, busy_s, joules)
            share = min(1.0, (busy_s - busy_before) / (now - before)) if now > before else 0.0
            self._busy_energy_j += share * (joules - joules_before)
        cpu_j = self._cpu_energy.read()
        return {"gpu_energy_j": joules, "busy_gpu_energy_j": self._busy_energy_j, "cpu_energy_j": cpu_j}

    def _binding_differences(self) -> tuple[str, ...]:
        read_s, before = self._differences
        if (now := self._clock()) - read_s <= _READ_S:
            return before
        try:
            new = binding_differences(self._spec, replace(kernel_binding.read_binding(), env=self._spec.env))
        except HpcGpuError as e:
            new = (str(e),)
        contexts = _other_contexts(self._spec)
        if contexts and not set(contexts) <= set(before):
            log.say(f"worker {self._spec.name} is not as planned: {contexts[0]}")
        new += contexts
        self._differences = (now, new)
        return new

    def _utilisation(self) -> int:
        """Return the percentage of the time since the last heartbeat in which a task ran."""
        now, busy_s = self._clock(), self.busy_s()
        (before, busy_before), self._last = self._last, (now, busy_s)
        return min(100, round(100 * (busy_s - busy_before) / (now - before))) if now > before else 0


def collect(dask_worker: Worker) -> WorkerFacts:
    """Collect a worker's facts, its binding as the kernel has it now; called in the worker."""
    plugin: Any = dask_worker.plugins.get("hpcgpu")  # of deploy.processes
    spec: WorkerSpec | None = getattr(plugin, "spec", None)
    name, node, memory = str(dask_worker.name), socket.gethostname(), _read_memory(dask_worker)
    if spec is None:
        return read_facts(name, memory, _read_device(spec), node=node)
    env = tuple((name, os.environ[name]) for name, _ in spec.env if name in os.environ)
    now = replace(kernel_binding.read_binding(), env=env)
    direct = {
        "spec": spec,
        "actual": now,
        "differences": (*binding_differences(spec, now), *_other_contexts(spec)),
        "node_copies": plugin.copy_obstacle(),
    }
    return read_facts(name, planned(spec), memory, _read_device(spec), node=node, **direct)


def _other_contexts(spec: WorkerSpec) -> tuple[str, ...]:
    """Return what to say of CUDA contexts on other GPUs than the worker's: a library may open them at any time."""
    if spec.gpu is None or spec.simulated:
        return ()
    try:
        first = cuda_driver.first_device()
    except LaunchError as e:
        return (str(e),)
    if first is None or not first.others:
        return ()
    where = ", ".join(map(str, first.others))
    return (f"it has a CUDA context on other GPUs, too (devices {where}), and takes their memory",)


def _read_memory(worker: Worker) -> dict[str, Any]:
    """Return a worker's memory and moves as plain data, under the names of :class:`WorkerFacts`."""
    store = worker.data
    facts = {"process_bytes": int(worker.monitor.get_process_memory()), "allocator": host_memory.in_force()}
    if not hasattr(store, "tiers"):  # not the spill store
        return facts
    tiers, spilled = store.tiers, store.spilled_total.disk
    immovable_number, immovable_bytes = store.immovable
    limit = {"device_limit_bytes": store.device_limit_bytes} if store.device_limit_bytes else {}
    return {
        **facts,
        **limit,
        "tiers": tiers,
        "copy_bytes": store.copy_bytes,
        "host_limit_bytes": worker.memory_manager.memory_limit or None,
        "spilled_to_host_bytes": max(0, spilled - tiers["disk"]),
        "moved": {way: (c.nbytes, c.number, c.seconds) for way, c in store.counters.items()},
        "rescues": store.rescues,
        "immovable_number": immovable_number,
        "immovable_bytes": immovable_bytes,
    }


def _read_device(spec: WorkerSpec | None) -> dict[str, Any]:
    """Return what is in use on the worker's device, and its size if no plan has it, without making a CUDA context."""
    if spec is not None and spec.gpu is None:
        return {}
    capacity = spec.device_memory_bytes if spec else 0
    sim = sys.modules.get("hpcgpu.sim") if spec is None or spec.simulated else None
    if sim:
        gpu = sim.current_gpu()
        now = gpu.used_bytes, gpu.memory_bytes, "simulated"
    elif (cupy := sys.modules.get("cupy")) and (pool := cupy.get_default_memory_pool()).total_bytes():
        now = pool.used_bytes(), capacity or cupy.cuda.runtime.memGetInfo()[1], "pool"
    elif nvml.device_get_count():
        now = nvml.real_time()["memory-used"], capacity or nvml.one_time()["memory-total"], "NVML"
    else:
        return {}
    return dict(zip(("device_used_bytes", "device_capacity_bytes", "device_source"), now, strict=True))
