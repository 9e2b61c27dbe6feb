"""Many threads at once, and threads whose allocations fail: they make room, and nobody waits for what they leave."""

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from replay_spill import Replay
from spill_stores import KIB, NewStore, SlowGpu
from spill_worlds import broken
from waiting import aside, scaled, until

from hpcgpu.sim import OutOfMemoryError, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.allocation_failure import AllocationFailureHook
from hpcgpu.spill.proxies import unproxy
from hpcgpu.spill.state.instructions import DEVICE, HOST, Copy
from hpcgpu.spill.store.handles import Handle
from hpcgpu.spill.store.inbox import this_thread

KEYS = 12
EPISODES, EPISODE_S = 80, 0.02
# CPython's GIL is not fair: four threads that never sleep kept the one that starts episodes waiting, here for up to
# 44 s, and in CI for longer than 120.
PAUSE_S = 0.0005


class BriefGpu(SimGpu):
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
            assert self.ends.wait(scaled(120))  # it lives on: nobody may wait for what lies in its inbox

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
    gpu = BriefGpu(100 * KIB)
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
            assert executor.state.moves == 0
        replay = Replay()
        replay.play(row for line in store.history for row in json.loads(line))
        assert replay.events > 1000
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


class HeldGpu(SlowGpu):
    """A device whose copies to the host wait in threads of one name."""

    waits = property(lambda _: threading.current_thread().name == "held")  # type: ignore[assignment]


@pytest.fixture
def gpu() -> HeldGpu:
    return HeldGpu(100 * KIB)


@pytest.fixture
def store(stored: NewStore, gpu: HeldGpu) -> GpuSpillBuffer:
    """Five values fill the device."""
    made = stored(100 * KIB, None)
    for i in range(5):
        made[i] = gpu.asarray(np.full(20 * KIB, i, "u1"))
    return made


def held(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, name="held", daemon=True)
    thread.start()
    return thread


def test_allocation_with_room_by_a_delete_leaves_no_copy(store: GpuSpillBuffer, gpu: HeldGpu) -> None:
    allocated, ends = threading.Event(), threading.Event()

    def task() -> None:
        gpu.empty(40 * KIB, "u1")  # two values must go; this thread copies them
        allocated.set()
        assert ends.wait(scaled(60))  # it does nothing else for the store

    held(task)
    assert gpu.under_way.wait(scaled(20))
    del store[2], store[3]  # enough
    gpu.go_on.set()
    try:
        assert allocated.wait(scaled(20))
        assert store.settle(scaled(20))
        for i in range(5, 9):
            store[i] = gpu.asarray(np.full(20 * KIB, i, "u1"))
        assert aside(lambda: [int(store[i].get()[0]) for i in store]).result(scaled(20)) == [0, 1, 4, 5, 6, 7, 8]
    finally:
        ends.set()


def test_an_allocation_on_an_event_loop_waits_for_nobody(store: GpuSpillBuffer, gpu: HeldGpu) -> None:
    """A task of another thread keeps all that there is: a thread would wait until it ends, the loop would not turn."""
    kept = [store[i] for i in range(5)]
    hook = gpu.on_alloc_failure
    assert isinstance(hook, AllocationFailureHook)
    hook.patience_s = 3600

    async def allocate() -> None:
        gpu.empty(20 * KIB, "u1")

    done = aside(lambda: asyncio.run(allocate()))
    assert isinstance(done.exception(20), OutOfMemoryError)
    assert len(kept) == 5


def test_an_allocation_that_is_interrupted_leaves_no_copy_behind(
    store: GpuSpillBuffer, gpu: HeldGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C in a notebook: what it has asked for goes all the same, by another thread."""
    interrupted, ends = threading.Event(), threading.Event()
    pack = HeldGpu.pack

    def once(gpu: HeldGpu, *arguments: Any) -> Any:
        if threading.current_thread().name == "held":
            raise KeyboardInterrupt
        return pack(gpu, *arguments)

    monkeypatch.setattr(HeldGpu, "pack", once)

    def task() -> None:
        with pytest.raises(KeyboardInterrupt):
            gpu.empty(60 * KIB, "u1")
        interrupted.set()
        assert ends.wait(scaled(60))

    held(task)
    try:
        assert interrupted.wait(scaled(20))
        until(lambda: not store._executor.state.moves, "no copy is left", limit_s=20)
        assert not store._executor.state.allocations
        del store[0]
        store[5] = gpu.asarray(np.full(20 * KIB, 5, "u1"))
        assert store.settle(scaled(20))
        assert aside(lambda: [int(store[i].get()[0]) for i in store]).result(scaled(20)) == [1, 2, 3, 4, 5]
    finally:
        ends.set()


def test_interrupted_allocation_loses_no_copy_up(
    store: GpuSpillBuffer, gpu: HeldGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, inbox = store._executor, this_thread.inbox
    monkeypatch.setattr(gpu, "pack", Mock(side_effect=KeyboardInterrupt))
    up = executor, Copy(store._entries[4].units[0], HOST, DEVICE, None, 1, 0)
    inbox.put(up)
    with pytest.raises(KeyboardInterrupt):
        executor.evict(gpu, 20 * KIB)
    assert inbox.get_nowait() is up
    assert inbox.empty()
