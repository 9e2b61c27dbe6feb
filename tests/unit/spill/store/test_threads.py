"""Many threads at once: reads, sets, deletes, handles and proxies held across them, and allocations that fail.

The threads live on, and do nothing, until all has been checked: nobody may wait for what lies in their inboxes.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from spill_stores import KIB, NewStore
from spill_worlds import broken
from waiting import aside, scaled

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices import AllocationFailureHook
from hpcgpu.spill.proxies import unproxy
from hpcgpu.spill.store import Handle

KEYS = 12
EPISODES, EPISODE_S = 80, 0.02
# CPython's GIL is not fair: four threads that never sleep kept the one that starts episodes waiting, here for up to
# 44 s, and in CI for longer than 120.
PAUSE_S = 0.0005


class SlowGpu(SimGpu):
    """A device whose copies to the host take so long that other events come meanwhile."""

    def pack(self, arrays: Any, *more: Any) -> Any:
        time.sleep(0.001)
        return super().pack(arrays, *more)


class Threads:
    """What threads do to one store until they are told to stop; each key has one value, whenever it is there."""

    def __init__(self, store: GpuSpillBuffer, gpu: SimGpu) -> None:
        self.store, self.gpu = store, gpu
        self.direct = 0.5  # the part of the reads that are done as user code does them
        self.stops, self.ends = threading.Event(), threading.Event()

    def start(self, act: Callable[[random.Random], None], seed: int, times: int = 1 << 30) -> tuple[Future, Future]:
        """Return what tells that a thread has acted for the last time, and that it has ended."""
        acted: Future = Future()

        def run() -> None:
            nonlocal times
            choose = random.Random(seed)
            try:
                while not self.stops.is_set() and (times := times - 1) >= 0:
                    act(choose)
                    time.sleep(PAUSE_S)
            except BaseException as e:
                acted.set_exception(e)
                raise
            acted.set_result(None)
            assert self.ends.wait(scaled(120))

        return acted, aside(run)

    def value(self, key: int) -> Any:
        device = self.gpu.asarray(np.full((4 + key) * KIB, key, "u1"))
        return [device, np.full((4 + key) * KIB, key, "u1")] if key % 3 else device

    def check(self, key: int, value: Any) -> None:
        for part in value if isinstance(value, list) else [value]:
            real = unproxy(part)
            assert set((real.get() if hasattr(real, "get") else real).tolist()) == {key}

    def change(self, choose: random.Random) -> None:
        key = choose.randrange(KEYS)
        try:
            if choose.random() < 0.5:
                self.store[key] = self.value(key)
            else:
                del self.store[key]
        except (KeyError, MemoryError):
            return

    def read(self, choose: random.Random) -> None:
        """Keep some values over other threads' deletes."""
        kept: list[tuple[int, Any]] = []
        for key in choose.sample(range(KEYS), 3):
            try:
                if choose.random() < self.direct:
                    kept.append((key, self.store[key]))
                    continue
                with self.store.handing_out_handles():
                    kept.append((key, self.store[key]))
            except (KeyError, MemoryError):
                continue
        while kept:
            key, value = kept.pop()
            try:
                value = value.resolve() if isinstance(value, Handle) else value  # and the handle goes
                self.check(key, value)
            except MemoryError:
                continue

    def allocate(self, choose: random.Random) -> None:
        try:
            self.gpu.empty(choose.choice((20, 40, 60)) * KIB, "u1")
        except MemoryError:
            return


@pytest.mark.parametrize("jit_unspill", [False, True], ids=["whole", "jit"])
def test_no_thread_keeps_another_waiting(stored: NewStore, monkeypatch: pytest.MonkeyPatch, jit_unspill: bool) -> None:
    monkeypatch.setattr(AllocationFailureHook, "patience_s", 0.02)
    gpu = SlowGpu(100 * KIB)
    store = stored(90 * KIB, 120 * KIB, jit_unspill=jit_unspill)
    threads = Threads(store, gpu)
    acts = [threads.change] * 2 + [threads.read] * 2
    started = [threads.start(act, seed) for seed, act in enumerate(acts)]
    try:
        for seed in range(EPISODES):  # each a thread of its own, which then does nothing
            started.append(threads.start(threads.allocate, seed, times=2))
            time.sleep(EPISODE_S)
        threads.stops.set()
        for acted, _ in started:
            acted.result(scaled(30))
        assert store.settle(scaled(20))
        executor = store._executor
        with executor.lock:
            units = {unit for entry in store._entries.values() for unit in entry.units}
            assert list(broken(executor.state, units, [], [])) == []
            assert executor.state.accounting.moves == 0
        for key in list(store):
            aside(lambda key=key: threads.check(key, store[key])).result(scaled(30))
    finally:
        threads.stops.set()
        threads.ends.set()
    for _, ended in started:
        ended.result(scaled(30))
    store.clear()
    gc.collect()
    assert store.settle(scaled(20))
    assert sum(store.tiers.values()) == gpu.used_bytes == 0
