"""Threads whose allocations fail: they make room themselves, and leave nothing behind that others wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from spill_stores import KIB, NewStore, SlowGpu
from waiting import aside, scaled, until

from hpcgpu.sim import OutOfMemoryError
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices import AllocationFailureHook
from hpcgpu.spill.state import DEVICE, HOST, Copy
from hpcgpu.spill.store import this_thread


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
        until(lambda: not store._executor.state.accounting.moves, "no copy is left", limit_s=20)
        assert not store._executor.state.allocations.waiting
        del store[0]
        store[5] = gpu.asarray(np.full(20 * KIB, 5, "u1"))
        assert store.settle(scaled(20))
        assert aside(lambda: [int(store[i].get()[0]) for i in store]).result(scaled(20)) == [1, 2, 3, 4, 5]
    finally:
        ends.set()


def test_interrupted_allocation_loses_no_copy_up(
    store: GpuSpillBuffer, gpu: HeldGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    executor, inbox = store._executor, this_thread.inbox
    monkeypatch.setattr(gpu, "pack", interrupted)
    up = executor, Copy(store._entries[4].units[0], HOST, DEVICE, None, 1, 0)
    inbox.put(up)
    with pytest.raises(KeyboardInterrupt):
        executor.evict(gpu, 20 * KIB)
    assert inbox.get_nowait() is up
    assert inbox.empty()
