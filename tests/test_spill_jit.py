"""JIT-unspill: objects of a task's value move one by one, and come up at first use."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgpu.sim import SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxy import is_proxy, unproxy

KIB = 1024
EACH = 20 * KIB


@dataclass
class Pair:
    left: Any
    right: Any


@pytest.fixture
def gpu() -> SimGpu:
    return SimGpu(1024 * KIB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[GpuSpillBuffer]:
    made = GpuSpillBuffer(64 * KIB, 0, str(tmp_path), jit_unspill=True)  # room for three
    yield made
    made.close()


def array(gpu: SimGpu, number: float) -> SimArray:
    return gpu.asarray(np.full(EACH // 8, float(number)))


def argument(store: GpuSpillBuffer, key: str) -> Any:
    """A key as the argument of a task."""
    with store.handing_out_handles():
        value = store[key]
    with store.using([key]):
        return value.resolve() if hasattr(value, "resolve") else value


def test_a_list_goes_down_one_by_one_and_reading_one_brings_back_one(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    store["list"] = [array(gpu, i) for i in range(10)]
    assert store.settle()
    assert store.tiers["device"] <= 64 * KIB
    value = argument(store, "list")
    copies = gpu.h2d_copies
    assert len(value) == 10
    assert all(isinstance(x, SimArray) for x in value)
    assert gpu.h2d_copies == copies  # nothing came up for that
    down = next(i for i in range(10) if store._entries["list"].places[i][0].tier != "device")
    assert float(value[down].sum().get()) == down * EACH / 8
    assert gpu.h2d_copies == copies + 1


def test_a_task_that_walks_a_list_needs_room_for_one(gpu: SimGpu, tmp_path: Path) -> None:
    store = GpuSpillBuffer(EACH + KIB, 0, str(tmp_path), jit_unspill=True)
    try:
        store["list"] = [array(gpu, i) for i in range(10)]
        assert store.settle()
        value, peak = argument(store, "list"), 0
        for i, x in enumerate(value):
            assert float((x + 1).sum().get()) == (i + 1) * EACH / 8
            assert store.settle()
            peak = max(peak, gpu.used_bytes)
        assert peak <= 2 * EACH
    finally:
        store.close()


@pytest.mark.parametrize(
    "wrap", [lambda a, h: {"a": a, "h": h}, lambda a, h: (a, h), Pair], ids=["dict", "tuple", "class"]
)
def test_any_container_and_objects_in_host_memory(tmp_path: Path, gpu: SimGpu, wrap: Any) -> None:
    store = GpuSpillBuffer(EACH // 2, 300 * KIB, str(tmp_path), jit_unspill=True)  # 180 KiB for the host
    try:
        frame = pd.DataFrame({"x": np.arange(16 * KIB)})
        store["a"] = wrap(array(gpu, 1), [np.full(100 * KIB, 7, np.uint8), frame, "text"])
        assert store.settle()
        assert store.tiers["disk"] >= 100 * KIB
        found = argument(store, "a")
        assert type(found) is type(wrap(1, 2))
        device, host = (
            found.values()
            if isinstance(found, dict)
            else found
            if isinstance(found, tuple)
            else (found.left, found.right)
        )
        assert (is_proxy(device), host[2]) == (True, "text")
        assert isinstance(host[1], pd.DataFrame)
        assert (int(host[0].sum()), int(host[1].x.sum())) == (7 * 100 * KIB, int(frame.x.sum()))
        assert unproxy(device).get()[0] == 1
    finally:
        store.close()


def test_a_value_that_is_an_array_is_real_in_a_task(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    for i, key in enumerate("abcdef"):
        store[key] = array(gpu, i)
        assert store.settle()
    for i, key in enumerate("abcdef"):
        value = argument(store, key)
        assert type(value) is SimArray
        assert value.get()[0] == i


def test_a_part_that_a_task_returns_is_the_same_object(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    store["list"] = [array(gpu, i) for i in range(10)]
    assert store.settle()
    bytes_before = sum(store.tiers.values())
    with store.using(["list"]):
        store["one"] = argument(store, "list")[3]
        store["pair"] = {"x": argument(store, "list")[4]}
    assert sum(store.tiers.values()) < bytes_before + KIB
    del store["list"]
    gc.collect()
    assert store.settle()
    assert 2 * EACH <= sum(store.tiers.values()) < 3 * EACH
    assert argument(store, "one").get()[0] == 3
    assert unproxy(argument(store, "pair")["x"]).get()[0] == 4


def test_writing_to_a_part_is_kept(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    store["list"] = [array(gpu, i) for i in range(10)]
    assert store.settle()
    for i in range(10):
        argument(store, "list")[i][0] = 100.0 + i
        assert store.settle()
    assert [unproxy(argument(store, "list")[i]).get()[0] for i in range(10)] == [100.0 + i for i in range(10)]


def test_what_is_deleted_is_gone_at_once(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    """Without waiting for the garbage collector."""
    gc.disable()
    try:
        store["list"] = [array(gpu, i) for i in range(3)]
        seen = weakref.ref(argument(store, "list")[0])
        del store["list"]
        assert store.settle()
        assert gpu.used_bytes == 0
        assert seen() is None
    finally:
        gc.enable()


def test_a_peer_gets_the_bytes_and_nothing_comes_up(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    host = np.arange(100 * KIB)
    store["list"] = [*(array(gpu, i) for i in range(10)), host]
    assert store.settle()
    copies = gpu.h2d_copies
    with store.handing_out_handles(to_worker=False):
        sent = pickle.dumps(store["list"])
    assert gpu.h2d_copies == copies
    received = pickle.loads(sent)  # a client: it has no store
    assert [x.get()[0] for x in received[:10]] == list(range(10))
    assert (received[10] == host).all()
    other = GpuSpillBuffer(64 * KIB, 0, jit_unspill=True)
    try:
        with store.handing_out_handles():
            other["list"] = store["list"].packed()
        copies = gpu.h2d_copies
        value = argument(other, "list")
        assert isinstance(value[5], SimArray)
        assert gpu.h2d_copies == copies
        assert float(value[5].sum().get()) == 5 * EACH / 8
    finally:
        other.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=30))
@settings(deadline=None, max_examples=60)
def test_any_sequence_of_sets_reads_and_writes(steps: list[tuple[int, int]]) -> None:
    gpu = SimGpu(1024 * KIB)
    store, model = GpuSpillBuffer(2 * EACH, 3 * EACH, jit_unspill=True), {}
    try:
        for number, (what, key) in enumerate(steps):
            name = str(key)
            if what == 0:
                store[name], model[name] = [array(gpu, number), {"h": array(gpu, -number)}], [number, -number]
            elif what == 1 and name in model:
                found = argument(store, name)
                assert [unproxy(found[0]).get()[0], unproxy(found[1]["h"]).get()[0]] == model[name]
            elif what == 2 and name in model:
                argument(store, name)[0][0] = 1000.0 + number
                model[name][0] = 1000 + number
            elif what == 3 and name in model:
                del store[name], model[name]
        for name, expected in model.items():
            found = argument(store, name)
            assert [unproxy(found[0]).get()[0], unproxy(found[1]["h"]).get()[0]] == expected
        assert set(store) == set(model)
    finally:
        store.close()
    del store
