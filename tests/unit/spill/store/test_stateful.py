"""Several stores on several devices against plain dicts, with limits so small that everything moves, and with faults.

Whatever fails, no key is lost and no answer is wrong: what cannot be read now can be read when the fault is over.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run
from spill_stores import KIB, FaultyGpu
from waiting import scaled

from hpcgpu.errors import SpillError
from hpcgpu.sim import OutOfMemoryError, SimArray
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices import AllocationFailureHook
from hpcgpu.spill.proxies import is_proxy, unproxy

STORES = st.integers(0, 1)
GPUS = st.integers(0, 1)
KEYS = st.sampled_from("abcd")
KINDS = st.sampled_from(["device", "host", "list", "nested", "views", "both", "small"])


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
        def write(*_: Any) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        self.is_full = True
        self.stores[store].disk.write = write  # type: ignore[method-assign]

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


class JitStores(Stores):
    jit_unspill = True


SETTINGS = settings(deadline=None, max_examples=40, stateful_step_count=30)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllocationFailureHook, "patience_s", 0.02)


def test_stores_are_like_dicts() -> None:
    run(Stores, settings=SETTINGS)


def test_stores_are_like_dicts_with_jit_unspill() -> None:
    run(JitStores, settings=SETTINGS)
