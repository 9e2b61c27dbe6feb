"""What one call of a store costs, in a process of nothing else, beside distributed's SpillBuffer and a dict."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from distributed.spill import SpillBuffer

from hpcgpu import sim
from hpcgpu.spill import GpuSpillBuffer

CALLS = 10_000
NO_LIMIT = 2**50
# how many numbers an array has, and how many keys there are
FULL = {2: (10_000, 1_000_000), 512: (10_000, 1_000_000), 8192: (10_000,)}
Stores = Mapping[tuple[str, str], MutableMapping[Any, Any]]
Figures = dict[tuple[str, str, str], list[float]]


def figures(runs: int) -> Figures:
    """Return CPU microseconds per call, of each run, by case, store and measure."""
    out: Figures = {}
    for numbers, counts in FULL.items():
        out |= on_host(numbers, counts, runs)
    return out | on_device(runs)


def on_host(numbers: int, counts: tuple[int, ...], runs: int) -> Figures:
    size = f"{numbers * 8 // 1024} KiB" if numbers * 8 >= 1024 else f"{numbers * 8} B"
    value_of = partial(np.full, numbers)
    values = [value_of(float(i)) for i in range(max(counts))]
    stores: dict[tuple[str, str], MutableMapping[Any, Any]] = {}
    with TemporaryDirectory() as folder:
        for count in counts:
            case = f"{count:,} keys of {size}"
            stores[case, "dict"] = {}
            stores[case, "SpillBuffer"] = SpillBuffer(f"{folder}/{count}", target=NO_LIMIT)
            stores[case, "hpcgpu"] = GpuSpillBuffer(0, NO_LIMIT, folder)
            for store in list(stores.values())[-3:]:
                fill(store, values[:count])
        out = microseconds(stores, value_of, runs)
        for store in stores.values():
            if isinstance(store, GpuSpillBuffer):
                store.close()
    return out


def on_device(runs: int) -> Figures:
    gpu, ours = sim.SimGpu(NO_LIMIT), GpuSpillBuffer(NO_LIMIT, NO_LIMIT)
    fill(ours, [gpu.adopt(np.full(2, float(i))) for i in range(CALLS)])
    stores = {(f"{CALLS:,} keys of 16 B on a device", "hpcgpu"): ours}
    out = microseconds(stores, lambda number: gpu.adopt(np.full(2, number)), runs)
    ours.close()
    return out


def fill(store: MutableMapping[Any, Any], values: list[Any]) -> None:
    for i, value in enumerate(values):
        store["block", i] = value


def microseconds(stores: Stores, value_of: Callable[[float], Any], runs: int) -> Figures:
    """Return what calls take in stores that are filled: all of them in each run, in turns from either end."""
    counts = {name: len(store) for name, store in stores.items()}
    out: Figures = {(*name, m): [] for name in stores for m in ("set_us", "get_us", "del_us")}
    gc.collect()
    gc.disable()  # its pauses depend on what else the process holds
    for run in range(runs):
        for name in list(stores)[:: 1 if run % 2 else -1]:
            store = stores[name]
            new = [(("block", -1 - i), value_of(float(i))) for i in range(CALLS)]
            # CPU time: others on the machine are not counted
            start = time.process_time()
            for key, value in new:
                store[key] = value
            out[*name, "set_us"].append((time.process_time() - start) / CALLS * 1e6)
            keys = [("block", (i * 7919 + run) % counts[name]) for i in range(CALLS)]
            start = time.process_time()
            for key in keys:
                store[key]
            out[*name, "get_us"].append((time.process_time() - start) / CALLS * 1e6)
            start = time.process_time()  # the values live on in ``new``: to free them is no part of it
            for key, _ in new:
                del store[key]
            out[*name, "del_us"].append((time.process_time() - start) / CALLS * 1e6)
    gc.enable()
    return out
