"""What one call of a mapping costs, in a process of nothing else."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcgpu import sim

CALLS = 10_000


def microseconds(
    make: Callable[[], Any], count: int, on_device: bool, runs: int, numbers: int = 2
) -> dict[str, list[float]]:
    """Return the microseconds per call, several times over, in a store that is filled once with arrays of numbers."""
    gpu = sim.SimGpu(2**50)

    def value_of(i: int) -> Any:  # noqa: ANN401 - an array of host or device
        array = np.full(numbers, float(i))
        return gpu.adopt(array) if on_device else array

    store = make()
    for i in range(count):
        store["block", i] = value_of(i)
    gc.collect()
    gc.disable()  # its pauses depend on what else the process holds
    out: dict[str, list[float]] = {"set_us": [], "get_us": []}
    for run in range(runs):
        new = [(("block", -1 - i), value_of(i)) for i in range(CALLS)]
        start = time.perf_counter()
        for key, value in new:
            store[key] = value
        out["set_us"].append((time.perf_counter() - start) / CALLS * 1e6)
        keys = [("block", (i * 7919 + run) % count) for i in range(CALLS)]
        start = time.perf_counter()
        for key in keys:
            store[key]
        out["get_us"].append((time.perf_counter() - start) / CALLS * 1e6)
        for key, _ in new:
            del store[key]
    gc.enable()
    if hasattr(store, "close"):
        store.close()
    return out
