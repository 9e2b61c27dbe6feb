"""Spill stores against plain dicts, with limits so small that everything moves, and with faults."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from dask.sizeof import sizeof
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from spill_stores import KIB, FaultyGpu, NewStore, filled, put
from waiting import logged, scaled

from hpcgpu.errors import SpillError
from hpcgpu.sim import OutOfMemoryError, SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.allocation_failure import AllocationFailureHook
from hpcgpu.spill.proxies import is_proxy, unproxy
from hpcgpu.spill.store.handles import Handle
from hpcgpu.spill.values.take_apart import Slot

CRASH = """
import sys, numpy as np
from hpcgpu.spill import GpuSpillBuffer
store = GpuSpillBuffer(0, 1024, sys.argv[1])
store["x"] = np.zeros(100_000)
store.settle(10)
print(store.disk.folder, store.tiers["disk"] > 0, flush=True)
sys.stdin.read()
"""
STORES = st.integers(0, 1)
GPUS = st.integers(0, 1)
KEYS = st.sampled_from("abcd")
KINDS = st.sampled_from(["device", "host", "list", "nested", "views", "both", "small"])


def test_every_tier_is_used_and_none_is_above_its_limit(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    filled(store, gpu)
    tiers = store.tiers
    assert tiers["device"] <= 64 * KIB
    assert tiers["host"] <= 0.6 * 64 * KIB + 40 * 100  # and the small parts of 40 values
    assert sum(tiers.values()) >= 40 * 8 * KIB
    assert gpu.used_bytes == tiers["device"]
    assert store.spilled_total.disk >= tiers["disk"] > 0
    assert [store[i].get()[0] for i in range(40)] == list(range(40))
    assert store.counters["disk_to_host"].nbytes > 0


def test_asking_and_deleting_move_nothing(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    filled(store, gpu)
    copies = (gpu.h2d_copies, gpu.d2h_copies, {k: c.number for k, c in store.counters.items()})
    assert 3 in store
    assert 99 not in store
    assert len(store) == 40
    assert sorted(store) == sorted(store.keys()) == list(range(40))
    for i in range(20):
        del store[i]
    store.clear()
    assert store.settle(scaled(10))
    assert copies == (gpu.h2d_copies, gpu.d2h_copies, {k: c.number for k, c in store.counters.items()})
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}
    assert gpu.used_bytes == 0


class Key:
    """A key that can be hashed, and compared with no other."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")


@pytest.mark.parametrize("nbytes", [100, 20 * KIB])
@pytest.mark.parametrize("bad", [[1], Key()])
def test_a_key_that_is_none_leaves_nothing(store: GpuSpillBuffer, gpu: SimGpu, bad: Any, nbytes: int) -> None:
    first: Any = Key()
    store[first] = 1
    before = store.tiers
    for _ in range(3):
        with pytest.raises(TypeError):
            store[bad] = gpu.asarray(np.zeros(nbytes, "u1"))
        with pytest.raises(TypeError):
            store[bad] = np.zeros(nbytes, "u1")
    assert (store.tiers, len(store), gpu.used_bytes) == (before, 1, 0)


def test_four_names_of_one_buffer_count_once_and_move_once(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    x = gpu.asarray(np.arange(5000.0))
    store["a"], store["b"], store["c"] = x, x, x[::2]
    store["d"] = [x[10:20], {"again": x}]
    assert store.tiers["device"] == 40_000
    del x
    filled(store, gpu, 20)
    before = gpu.h2d_copies
    back = [store["a"], store["b"], store["c"], store["d"][0], store["d"][1]["again"]]
    assert gpu.h2d_copies == before + 1
    assert len({gpu.buffer_of(a) for a in back}) == 1
    assert store["a"] is store["b"]
    np.testing.assert_array_equal(back[2].get(), np.arange(5000.0)[::2])


def test_a_value_read_back_and_stored_again_counts_once(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    filled(store, gpu)
    used = sum(store.tiers.values())
    store["again"] = store[0]
    store["view"] = store[0][:10]
    assert sum(store.tiers.values()) < used + 8 * KIB


def test_what_a_task_uses_stays(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    store["x"] = gpu.asarray(np.zeros(50 * KIB, "u1"))
    with store.using(["x", "unknown"]):
        filled(store, gpu)
        used = store.tiers["device"]
        copies = gpu.h2d_copies
        assert store["x"].nbytes == 50 * KIB
        assert gpu.h2d_copies == copies
        assert used >= 50 * KIB


def test_handles_only_where_they_are_asked_for(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    filled(store, gpu)
    copies = gpu.h2d_copies
    with store.handing_out_handles():
        handle = store[0]
        assert type(store[39]) is SimArray  # it is up
    assert gpu.h2d_copies == copies
    assert handle.nbytes >= 8 * KIB
    again = pickle.loads(pickle.dumps(handle.packed().skeleton))
    assert again == Slot(0)
    assert type(handle.resolve()) is SimArray
    assert type(store[1]) is SimArray


def test_a_peers_bytes_stay_on_the_host_until_used(store: GpuSpillBuffer, gpu: SimGpu, stored: NewStore) -> None:
    filled(store, gpu)
    with store.handing_out_handles():
        packed = store[0].packed()
    other = stored(64 * KIB, None)
    copies = gpu.h2d_copies
    other["x"] = packed
    assert gpu.h2d_copies == copies
    assert other.tiers["host"] >= 8 * KIB
    np.testing.assert_array_equal(other["x"].get(), store[0].get())


@pytest.mark.parametrize("of_jit", [False, True], ids=["of whole", "of jit"])
@pytest.mark.parametrize("to_jit", [False, True], ids=["to whole", "to jit"])
def test_a_handle_of_another_store_is_stored_as_its_value(
    stored: NewStore, gpu: SimGpu, of_jit: bool, to_jit: bool
) -> None:
    source, other = stored(64 * KIB, 64 * KIB, jit_unspill=of_jit), stored(jit_unspill=to_jit)
    put(source, range(40), lambda i: [gpu.asarray(np.full(8 * KIB, i, "u1"))])
    with source.handing_out_handles():
        handle = source[0]
    assert type(handle) is Handle
    other["x"] = handle
    [found] = other["x"]
    assert is_proxy(found) == to_jit
    source.close()  # what the other store has is its own
    assert int(found[-1]) == 0


def test_values_that_need_no_thread_leave_as_they_are(stored: NewStore, gpu: SimGpu) -> None:
    store = stored(jit_unspill=True)
    values = {"host": np.zeros(100 * KIB), "number": 1, "device": gpu.empty(10, "u1"), "list": [gpu.empty(10, "u1")]}
    store.update(values)
    kept = list(store.values())  # a list with proxies is up once it was read
    with store.handing_out_handles():
        assert Handle not in {type(store[key]) for key in store}
    with store.handing_out_handles(leaving=True):
        assert {key for key in store if type(store[key]) is Handle} == {"device", "list"}
    assert len(kept) == 4


def test_a_value_that_cannot_be_pickled_stays_in_memory(
    store: GpuSpillBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    kept = [{"lock": threading.Lock(), "text": "x" * 100_000} for _ in range(3)]
    for i in range(3):
        store["kept", i] = kept[i]
    store["host"] = np.ones(100_000, "u1")
    assert store.settle(scaled(10))
    assert all(store["kept", i] is kept[i] for i in range(3))
    assert store["host"].sum() == 100_000
    assert store.immovable == (3, sum(map(sizeof, kept)))
    (record,) = logged(caplog)
    assert record.getMessage().startswith("a builtins.dict cannot be pickled; such values stay in memory")
    assert len(record.getMessage()) < 200
    store.clear()
    assert store.immovable == (0, 0)


def test_what_cannot_be_read_back_is_said_with_its_key(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    filled(store, gpu)
    faults: list[SpillError] = []
    store.on_fault = faults.append
    files = [p for p in store.disk.folder.iterdir() if p.name != ".lock"]
    for path in files:
        os.truncate(path, 10)
    with pytest.raises(SpillError, match="the value of 0 cannot be read back") as fault:
        store[0]
    assert isinstance(fault.value.__cause__, OSError)
    assert [str(told) for told in faults] == [str(fault.value)]
    with store.handing_out_handles():
        handle = store[1]
    with pytest.raises(SpillError, match="the value of 1 cannot be read back"):
        handle.packed()  # for a peer
    assert len(faults) == 1


def test_what_a_crash_leaves_is_removed_by_the_next_start(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CRASH, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        folder, spilled = other.stdout.readline().split()
        alive = GpuSpillBuffer(0, 1024, str(tmp_path))
        assert Path(folder).exists()
        assert (Path(folder).stat().st_mode & 0o777, spilled) == (0o700, "True")
        other.send_signal(signal.SIGKILL)
    after = GpuSpillBuffer(0, 1024, str(tmp_path))
    assert not Path(folder).exists()
    assert alive.disk.folder.exists()
    alive.close()
    after.close()


def test_a_closed_store_keeps_its_keys_and_no_values(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    """distributed counts the keys of a worker that it has closed, and deletes them (validate_state)."""
    filled(store, gpu)
    keys = list(store)
    store.close()
    assert (list(store), len(store), 3 in store) == (keys, len(keys), True)
    assert gpu.used_bytes == sum(store.tiers.values()) == 0
    with pytest.raises(SpillError, match="value of 3 went when its store was closed"):
        store[3]
    with store.using(keys):  # a task that runs at its end
        del store[3]
    assert 3 not in store
    store[4] = 1
    assert store[4] == 1
    store.close()
    store.clear()
    assert list(store) == []


@pytest.mark.parametrize(
    ("value", "expected"), [(0.5, 512 * KIB), ("0.25", 256 * KIB), ("300KiB", 300 * KIB), (KIB, KIB), (0, 0), (None, 0)]
)
def test_limits(stored: NewStore, gpu: SimGpu, value: Any, expected: int) -> None:
    store = stored(value, None)
    store["x"] = gpu.asarray(np.zeros(10))
    assert store.device_limit_bytes == expected


@dataclass
class Pair:
    left: Any
    right: Any


def plain(value: Any) -> Any:
    """A value with its device arrays copied to the host, to compare."""
    value = unproxy(value) if is_proxy(value) else value
    if isinstance(value, SimArray):
        return value.get().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Pair):
        return [plain(value.left), plain(value.right)]
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value


class Stores(RuleBasedStateMachine):
    """Stores that share devices, as workers of one process do; values of one are also put into another."""

    jit_unspill = False

    @initialize(device=st.sampled_from([0, 4 * KIB, 0.01]), host=st.sampled_from([0, 8 * KIB]))
    def start(self, device: float, host: int) -> None:
        self.gpus = [FaultyGpu(256 * KIB) for _ in range(2)]
        self.stores = [GpuSpillBuffer(device, host, jit_unspill=self.jit_unspill) for _ in range(2)]
        self.writes = [store.disk.write for store in self.stores]
        self.models: list[dict[str, Any]] = [{}, {}]
        self.others: list[Any] = []
        self.is_full = False
        self.number = 0

    @property
    def is_faulty(self) -> bool:
        return bool(self.others or self.is_full or any(gpu.down for gpu in self.gpus))

    def answered(self, read: Any) -> Any:
        """Return a list with what was read; without anything where a fault is a reason."""
        try:
            return [read()]
        except (RuntimeError, OutOfMemoryError, SpillError):  # the latter from a proxy
            assert self.is_faulty
            return []

    def value(self, kind: str, size: int, number: int) -> Any:
        self.number += 1
        host = np.full(size, self.number, "i4")
        device = self.gpus[number].asarray(host[:1500])
        if kind == "both":
            return [device, {"there": self.gpus[1 - number].asarray(host[:900])}, host]
        return {
            "device": lambda: device,
            "host": lambda: host,
            "list": lambda: [device, host, device[::2], "text"],
            "nested": lambda: {"a": (device, [device * 2]), "b": Pair(device, host)},
            "views": lambda: [host, {"a": host[size // 3 :], "b": host[::-2]}, host[1:5]],
            "small": lambda: self.number,
        }[kind]()

    @rule(store=STORES, keys=st.lists(KEYS, max_size=4, unique=True), gpu=GPUS, size=st.integers(500, 1500))
    def fill(self, store: int, keys: list[str], gpu: int, size: int) -> None:
        for key in keys:
            self.set(store, key, "list", gpu, size)

    @rule(store=STORES, key=KEYS, kind=KINDS, gpu=GPUS, size=st.integers(0, 1500) | st.just(30_000))
    def set(self, store: int, key: str, kind: str, gpu: int, size: int) -> None:
        for value in self.answered(lambda: self.value(kind, size, gpu)):
            self.models[store][key] = plain(value)
            self.stores[store][key] = value

    @rule(store=STORES, key=KEYS, of=STORES, other=KEYS)
    def alias(self, store: int, key: str, of: int, other: str) -> None:
        if other in self.models[of]:
            for value in self.answered(lambda: self.stores[of][other]):
                self.stores[store][key] = value
                self.models[store][key] = self.models[of][other]

    @rule(store=STORES, key=KEYS, other=KEYS, start=st.integers(0, 900), step=st.sampled_from([1, 2, -1]))
    def view(self, store: int, key: str, other: str, start: int, step: int) -> None:
        if other in self.models[store]:
            for whole in self.answered(lambda: self.stores[store][other]):
                if type(whole) is np.ndarray:
                    self.stores[store][key] = whole[start::step]
                    self.models[store][key] = whole[start::step].tolist()

    @rule(store=STORES, key=KEYS)
    def get(self, store: int, key: str) -> None:
        if key in self.models[store]:
            for found in self.answered(lambda: plain(self.stores[store][key])):
                assert found == self.models[store][key]
        else:
            try:
                self.stores[store][key]
            except KeyError:
                return
            raise AssertionError("a key that is not there has a value")

    @rule(store=STORES, key=KEYS)
    def travel(self, store: int, key: str) -> None:
        if key in self.models[store]:
            with self.stores[store].handing_out_handles():
                found = self.stores[store][key]
            for again in self.answered(lambda: found.packed().unpack() if hasattr(found, "packed") else found):
                for value in self.answered(lambda: plain(again)):  # noqa: B023 - called at once
                    assert value == self.models[store][key]

    @rule(store=STORES, key=KEYS)
    def delete(self, store: int, key: str) -> None:
        if self.models[store].pop(key, None) is not None:
            del self.stores[store][key]

    @rule(store=STORES)
    def settle(self, store: int) -> None:
        assert self.stores[store].settle(scaled(10))

    @rule(store=STORES)
    def evict(self, store: int) -> None:
        assert self.stores[store].evict() == -1

    @rule(gpu=GPUS)
    def break_copies(self, gpu: int) -> None:
        self.gpus[gpu].down = self.gpus[gpu].up = RuntimeError("cudaErrorIllegalAddress")

    @rule(store=STORES)
    def fill_disk(self, store: int) -> None:
        self.is_full = True
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        self.stores[store].disk.write = full  # type: ignore[method-assign]

    @rule(gpu=GPUS, left=st.integers(0, 8))
    def be_short_of_memory(self, gpu: int, left: int) -> None:
        """Have somebody else take the device's memory."""
        free = self.gpus[gpu].memory_bytes - self.gpus[gpu].used_bytes
        if free > left * KIB:
            for taken in self.answered(lambda: self.gpus[gpu].empty(free - left * KIB, "u1")):
                self.others.append(taken)

    @precondition(lambda self: self.is_faulty)
    @rule()
    def mend(self) -> None:
        self.others.clear()
        self.is_full = False
        for gpu in self.gpus:
            gpu.down = gpu.up = None
        for store, write in zip(self.stores, self.writes, strict=True):
            store.disk.write = write  # type: ignore[method-assign]

    @invariant()
    def same_keys(self) -> None:
        if hasattr(self, "stores"):
            for store, model in zip(self.stores, self.models, strict=True):
                assert set(store) == set(model)
                assert len(store) == len(model)
                assert all(size >= 0 for size in store.tiers.values())

    def teardown(self) -> None:
        if not hasattr(self, "stores"):
            return
        self.mend()
        try:
            for store, model in zip(self.stores, self.models, strict=True):
                for key, expected in model.items():
                    assert plain(store[key]) == expected
                assert store.settle(scaled(10))
        finally:
            folders = [store.disk.folder for store in self.stores]
            for store in self.stores:
                store.close()
        assert [store.tiers for store in self.stores] == [{"device": 0, "host": 0, "disk": 0}] * 2
        assert not any(folder.exists() for folder in folders)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllocationFailureHook, "patience_s", 0.02)


@pytest.mark.parametrize("jit_unspill", [False, True], ids=["whole", "jit"])
def test_stores_are_like_dicts(monkeypatch: pytest.MonkeyPatch, jit_unspill: bool) -> None:
    monkeypatch.setattr(Stores, "jit_unspill", jit_unspill)
    run(Stores, settings=settings(deadline=None, max_examples=40, stateful_step_count=30))
