"""Two locks never wait for each other; a reader gets the value that its key had, whoever deletes it meanwhile."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lock_guard import guarded_lock
from spill_stores import KIB, NewStore, Odd, SlowGpu, put
from waiting import aside, scaled

from hpcgpu.errors import SpillError
from hpcgpu.sim import OutOfMemoryError, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxies import asproxy, is_proxy, unproxy
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.store.identity_map import Reader

ASKS: dict[str, Callable[[GpuSpillBuffer, Any], object]] = {
    "a proxy is touched": lambda _, p: p.get(),
    "a proxy is written to": lambda _, p: p.fill(0),
    "a key is read": lambda store, _: store["low"],
    "a key is set": lambda store, _: store.__setitem__("new", 1),
    "a key is deleted": lambda store, _: store.__delitem__("low"),
    "the tiers are asked for": lambda store, _: store.tiers,
    "keys are used": lambda store, _: store.using(["low"]).__enter__(),
}


@pytest.fixture
def stores(stored: NewStore) -> tuple[GpuSpillBuffer, GpuSpillBuffer]:
    return stored(64 * KIB, 1024 * KIB, jit_unspill=True), stored(64 * KIB, 1024 * KIB, jit_unspill=True)


def test_proxy_of_a_moving_object_can_be_stored(stores: Any) -> None:
    gpu, (store, _) = SlowGpu(1024 * KIB), stores
    store["a"] = [gpu.asarray(np.full(40 * KIB, 1, "u1"))]
    (p,) = store["a"]
    assert is_proxy(p)
    gpu.waits = True
    store["c"] = [gpu.asarray(np.full(60 * KIB, 2, "u1"))]
    assert gpu.under_way.wait(scaled(20))
    aside(lambda: store.__setitem__("b", asproxy([p]))).result(scaled(20))
    gpu.waits = False
    gpu.go_on.set()
    assert store.settle(scaled(20))
    assert [int(store[key][0].get()[0]) for key in "abc"] == [1, 1, 2]


def test_proxies_across_stores_while_an_allocation_evicts_both(stores: Any) -> None:
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
        done.result(scaled(60))
    for turn in range(5):
        for i in range(6):
            assert [int(x.get()[0]) for x in theirs[turn, i]] == [i, i]


def test_what_reads_from_the_store_while_it_is_pickled(stored: NewStore) -> None:
    """The spill thread itself brings up what user code asks for: nobody else would."""
    store = stored(0, 100 * KIB)
    store["far"] = np.full(50 * KIB, 7, "u1")
    store["other"] = np.full(50 * KIB, 8, "u1")
    assert store.settle(scaled(20))
    assert store.tiers["disk"] > 0
    read: list[int] = []

    def ask() -> Any:
        read.extend(int(store[key][0]) for key in ("far", "other"))
        return int, ("3",)

    store["asks"] = Odd(70 * KIB, ask)
    assert store.settle(scaled(20))
    assert read == [7, 8]
    assert store["asks"] == 3


def test_the_guard_sees_what_is_done_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="_free under the lock"), guarded_lock(monkeypatch):
        store = GpuSpillBuffer(0, None, str(tmp_path))
        array = SimGpu(100 * KIB).empty(10 * KIB, "u1")
        with store._executor.lock:
            del array
        store.close()


def in_the_middle(lock: Any, call: Callable[[], object]) -> object:
    """Return the result or the error of a call that the garbage collector makes, in a thread that has the lock."""

    class Circle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            try:
                found.append(call())
            except Exception as e:
                found.append(e.with_traceback(None))

    found: list[object] = []

    def collect() -> None:
        Circle()
        with lock:
            gc.collect()

    gc.disable()  # a collection that comes by itself may find the circle before this thread has the lock
    try:
        aside(collect).result(scaled(20))
    finally:
        gc.enable()
    assert found
    return found[0]


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_del_that_asks_the_store_under_its_lock_gets_an_error(
    stores: Any, gpu: SimGpu, ask: Callable[[GpuSpillBuffer, Any], object]
) -> None:
    store, _ = stores
    store["low"] = [gpu.asarray(np.full(40 * KIB, 1, "u1"))]
    proxies = list(store["low"])
    store["high"] = [gpu.asarray(np.full(40 * KIB, 2, "u1"))]
    assert store.settle(scaled(20))
    error = in_the_middle(store._executor.lock, lambda: ask(store, proxies[0]))
    assert isinstance(error, SpillError) and "in use by this thread" in str(error)
    assert proxies[0].get()[0] == 1  # as before
    assert set(store) == {"low", "high"}
    proxies.clear()
    store.clear()
    assert store.settle(scaled(20))
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}
    assert gpu.used_bytes == 0


def test_an_allocation_under_the_lock_fails_as_without_a_store(stores: Any) -> None:
    store, _ = stores
    gpu = SimGpu(100 * KIB)
    store["key"] = gpu.asarray(np.full(60 * KIB, 1, "u1"))
    assert isinstance(in_the_middle(store._executor.lock, lambda: gpu.empty(80 * KIB, "u1")), OutOfMemoryError)
    assert gpu.empty(80 * KIB, "u1").nbytes == 80 * KIB


def test_what_a_generator_uses_is_given_back_later(stores: Any, gpu: SimGpu) -> None:
    store, _ = stores
    store["key"] = gpu.asarray(np.full(40 * KIB, 1, "u1"))

    def uses(circle: list[Any]) -> Iterator[None]:
        with store.using(["key"]):
            yield
        del circle

    def use() -> None:
        circle: list[Any] = []
        circle.append(uses(circle))
        next(circle[0])
        del circle
        with store._executor.lock:
            gc.collect()

    aside(use).result(scaled(20))
    (unit,) = store._entries["key"].units
    store["other"] = 1
    assert unit.pins == 0


@pytest.mark.parametrize("lock", [lambda store: store.disk.slabs._lock, lambda store: store.disk.segments._lock])
def test_value_that_a_del_reads_under_the_disks_lock_is_kept(
    stored: NewStore, lock: Callable[[GpuSpillBuffer], Any]
) -> None:
    store = stored(0, 64 * KIB, target=1.0)
    put(store, range(10), lambda i: np.full(60 * KIB, i, "u1"))
    assert isinstance(in_the_middle(lock(store), lambda: store[0]), SpillError | np.ndarray)
    assert store[0][0] == 0


@contextmanager
def read_in_the_middle(monkeypatch: pytest.MonkeyPatch, store: GpuSpillBuffer, key: Any, where: Any) -> Iterator[Any]:
    """Read a key in another thread, which is in the middle of ``where`` while inside; then its result is there."""
    inside, go_on = threading.Event(), threading.Event()
    owner, name = where
    plain = getattr(owner, name)

    def slow(*args: Any) -> Any:
        inside.set()
        assert go_on.wait(scaled(20))
        return plain(*args)

    monkeypatch.setattr(owner, name, slow)
    done = aside(lambda: store[key])
    assert inside.wait(scaled(20))
    yield done
    go_on.set()


def lowest(store: GpuSpillBuffer, keys: Any) -> Any:
    return next(key for key in keys if store._entries[key].units[0].tier < store._entries[key].units[0].top)


@pytest.mark.parametrize("change", ["deleted", "set"])
def test_a_small_value(monkeypatch: pytest.MonkeyPatch, stored: NewStore, change: str) -> None:
    store = stored(0, 2 * KIB, target=1.0)
    put(store, range(40), lambda i: "x" * 200 + str(i))
    key = lowest(store, range(40))
    with read_in_the_middle(monkeypatch, store, key, (Disk, "read")) as done:
        if change == "deleted":
            del store[key]
        else:
            store[key] = "another"
    assert done.result(scaled(20)) == "x" * 200 + str(key)


def test_a_small_array_on_the_device(monkeypatch: pytest.MonkeyPatch, stored: NewStore, gpu: SimGpu) -> None:
    store = stored(KIB, 100 * KIB)
    put(store, range(10), lambda i: gpu.asarray(np.full(300, i, "u1")))
    key = lowest(store, range(10))
    with read_in_the_middle(monkeypatch, store, key, (SimGpu, "unpack")) as done:
        del store[key]
    assert done.result(scaled(20)).get().tolist() == [key] * 300


@pytest.mark.parametrize("nbytes", [500, 20 * KIB])
def test_a_list_that_comes_up_by_parts(
    monkeypatch: pytest.MonkeyPatch, stored: NewStore, gpu: SimGpu, nbytes: int
) -> None:
    store = stored(100 * KIB, 100 * KIB, jit_unspill=True)
    store["key"] = [gpu.asarray(np.full(nbytes, i, "u1")) for i in range(2)]
    store["other"] = [gpu.asarray(np.full(nbytes, 2, "u1"))]
    with read_in_the_middle(monkeypatch, store, "key", (Reader, "_part")) as done:
        del store["key"]
    found = done.result(scaled(20))
    assert [unproxy(x).get().tolist() for x in found] == [[i] * nbytes for i in range(2)]
    del found, done
    assert store.tiers["device"] == nbytes
    store["next"] = 1
    del store["next"], store["other"]
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}


def test_a_value_that_was_read_goes_with_its_key(stored: NewStore) -> None:
    """What keeps a name while it reads keeps none afterwards."""
    store = stored(0, 2 * KIB, target=1.0)
    put(store, range(40), lambda i: "x" * 200 + str(i))
    assert [store[i][200:] for i in range(40)] == [str(i) for i in range(40)]
    assert {entry.names for entry in store._entries.values()} == {1}
    store.clear()
    assert store.settle()
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}
