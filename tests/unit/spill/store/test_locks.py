"""Two locks never wait for each other: cases that hung once, and the guard that sees forbidden calls under the lock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lock_guard import guarded_lock
from spill_stores import KIB, SlowGpu
from waiting import aside

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxies.dask import asproxy
from hpcgpu.spill.proxies.proxy import is_proxy


@pytest.fixture
def stores(stored: Callable[..., GpuSpillBuffer]) -> tuple[GpuSpillBuffer, GpuSpillBuffer]:
    return stored(64 * KIB, 1024 * KIB, jit_unspill=True), stored(64 * KIB, 1024 * KIB, jit_unspill=True)


def test_a_proxy_whose_object_moves_can_be_stored_in_another_value(stores: Any) -> None:
    gpu, (store, _) = SlowGpu(1024 * KIB), stores
    store["a"] = [gpu.asarray(np.full(40 * KIB, 1, "u1"))]
    (p,) = store["a"]
    assert is_proxy(p)
    gpu.waits = True
    store["c"] = [gpu.asarray(np.full(60 * KIB, 2, "u1"))]
    assert gpu.under_way.wait(20)
    aside(lambda: store.__setitem__("b", asproxy([p]))).result(20)
    gpu.waits = False
    gpu.go_on.set()
    assert store.settle(20)
    assert [int(store[key][0].get()[0]) for key in "abc"] == [1, 1, 2]


def test_proxies_of_one_store_in_another_while_an_allocation_asks_both(stores: Any) -> None:
    """Each store's thread copies, each store is asked for room, and each reads from the other."""
    gpu, (ours, theirs) = SlowGpu(256 * KIB), stores
    for i in range(6):
        ours[i] = [gpu.asarray(np.full(20 * KIB, i, "u1"))]
    proxies = [ours[i][0] for i in range(6)]

    def take_over() -> None:
        for turn in range(5):
            for i, p in enumerate(proxies):
                theirs[turn, i] = [p, gpu.asarray(np.full(16 * KIB, i, "u1"))]

    def allocate() -> None:
        for _ in range(20):
            gpu.empty(180 * KIB, "u1")

    for done in (aside(take_over), aside(allocate)):
        done.result(60)
    for turn in range(5):
        for i in range(6):
            assert [int(x.get()[0]) for x in theirs[turn, i]] == [i, i]


def test_what_reads_from_the_store_while_it_is_pickled(tmp_path: Path) -> None:
    """The spill thread itself brings up what user code asks for: nobody else would."""
    store = GpuSpillBuffer(0, 100 * KIB, str(tmp_path))
    try:
        store["far"] = np.full(50 * KIB, 7, "u1")
        store["other"] = np.full(50 * KIB, 8, "u1")
        assert store.settle(20)
        assert store.tiers["disk"] > 0
        read: list[int] = []

        class Asks:
            def __sizeof__(self) -> int:
                return 70 * KIB

            def __reduce__(self) -> Any:
                read.extend(int(store[key][0]) for key in ("far", "other"))
                return int, ("3",)

        store["asks"] = Asks()
        assert store.settle(20)
        assert read == [7, 8]
        assert store["asks"] == 3
    finally:
        store.close()


def test_the_guard_sees_what_is_done_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="_free under the lock"), guarded_lock(monkeypatch):
        store = GpuSpillBuffer(0, None, str(tmp_path))
        array = SimGpu(100 * KIB).empty(10 * KIB, "u1")
        with store._executor.lock:
            del array
        store.close()
