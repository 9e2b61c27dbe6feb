"""JIT-unspill: objects of a task's value move one by one, and come up at first use."""

import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from spill_stores import KIB, NewStore, argument, to_disk
from waiting import scaled

from hpcgpu.errors import SpillError
from hpcgpu.sim import SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxies import is_proxy, unproxy

EACH = 20 * KIB


@dataclass
class Pair:
    left: Any
    right: Any


class Model:
    """As CuPy's sparse matrices: arrays in attributes, methods that hand them to compiled code."""

    def __init__(self, weights: Any) -> None:
        self.name, self.weights = "model", weights

    def total(self) -> float:
        assert type(self.weights) is SimArray
        return float(self.weights.sum().get())


@pytest.fixture
def store(stored: NewStore) -> GpuSpillBuffer:
    return stored(64 * KIB, 0, jit_unspill=True)  # room for three


def array(gpu: SimGpu, number: float) -> SimArray:
    return gpu.asarray(np.full(EACH // 8, float(number)))


def test_elements_of_a_list_go_down_and_up_one_by_one(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    store["list"] = [array(gpu, i) for i in range(10)]
    assert store.settle()
    assert store.tiers["device"] <= 64 * KIB
    value = argument(store, "list")
    copies = gpu.h2d_copies
    assert len(value) == 10
    assert all(isinstance(x, SimArray) for x in value)
    assert gpu.h2d_copies == copies  # nothing came up for that
    down = next(i for i in range(10) if store._entries["list"].locations[i][0].tier != "device")
    assert float(value[down].sum().get()) == down * EACH / 8
    assert gpu.h2d_copies == copies + 1


def test_the_length_of_what_is_below_is_known_without_it(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    store["list"] = [gpu.asarray(np.zeros((i + 1, 2 * KIB))) for i in range(10)]
    store["views"] = [(whole := gpu.asarray(np.zeros((4, 2 * KIB)))), whole[:3]]
    del whole
    assert store.settle()
    values, copies = argument(store, "list") + argument(store, "views"), gpu.h2d_copies
    assert [len(x) for x in values] == [*range(1, 11), 4, 3]
    assert gpu.h2d_copies == copies
    first = values[0]
    first.shape = (2 * KIB, 1)  # written to while it is up, and down again
    store["others"] = [array(gpu, i) for i in range(8)]
    assert store.settle()
    copies = gpu.h2d_copies
    assert len(first) == 2 * KIB
    assert gpu.h2d_copies == copies


def test_the_length_of_what_is_on_disk_is_known_without_it(stored: NewStore) -> None:
    store = stored(0, 100 * KIB, jit_unspill=True)
    frame = pd.DataFrame({"x": np.arange(16 * KIB)})
    store["a"] = [np.zeros((100, 8 * KIB), "u1"), frame, np.array(1.0), pd.Series(np.arange(16 * KIB), name="y")]
    del frame
    assert store.settle()
    on_disk, values = store.tiers["disk"], argument(store, "a")
    assert on_disk > 900 * KIB
    assert [len(x) for x in values[:2]] == [100, 16 * KIB]
    assert values[3].name == "y"  # dask asks it of each series and index
    assert store.counters["disk_to_host"].nbytes < KIB  # of the list itself


def test_a_task_that_walks_a_list_needs_room_for_one(gpu: SimGpu, stored: NewStore) -> None:
    store = stored(EACH + KIB, 0, jit_unspill=True)
    store["list"] = [array(gpu, i) for i in range(10)]
    assert store.settle()
    value, peak = argument(store, "list"), 0
    for i, x in enumerate(value):
        assert float((x + 1).sum().get()) == (i + 1) * EACH / 8
        assert store.settle()
        peak = max(peak, gpu.used_bytes)
    assert peak <= 2 * EACH


@pytest.mark.parametrize(
    "wrap", [lambda a, h: {"a": a, "h": h}, lambda a, h: (a, h), Pair], ids=["dict", "tuple", "class"]
)
def test_any_container_and_objects_in_host_memory(stored: NewStore, gpu: SimGpu, wrap: Any) -> None:
    store = stored(EACH // 2, 300 * KIB, jit_unspill=True)  # 180 KiB for the host
    frame = pd.DataFrame({"x": np.arange(16 * KIB)})
    store["a"] = wrap(array(gpu, 1), [np.full(100 * KIB, 7, np.uint8), frame, "text"])
    assert store.settle()
    assert store.tiers["disk"] >= 100 * KIB
    found = argument(store, "a")
    assert type(found) is type(wrap(1, 2))
    device, host = (
        found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else (found.left, found.right)
    )
    assert (is_proxy(device), host[2]) == (True, "text")
    assert isinstance(host[1], pd.DataFrame)
    assert (int(host[0].sum()), int(host[1].x.sum())) == (7 * 100 * KIB, int(frame.x.sum()))
    assert unproxy(device).get()[0] == 1


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


@pytest.fixture
def frames(stored: NewStore) -> GpuSpillBuffer:
    """A store of host memory that is never full: only ``evict`` sends something to disk."""
    return stored(0, None, jit_unspill=True)


def numbers() -> pd.DataFrame:
    return pd.DataFrame({f"c{i}": np.arange(16 * KIB) + i / 2 for i in range(10)})


def on_disk(frames: GpuSpillBuffer, frame: pd.DataFrame) -> Any:
    """Return the proxy of a copy that is on disk."""
    frames["list"] = [frame.copy()]
    to_disk(frames)
    return argument(frames, "list")[0]


@pytest.mark.parametrize(
    "ask", [lambda f: float(f["c3"].sum()), lambda f: f[["c1", "c2"]].shape, lambda f: f.shape, list]
)
def test_the_first_touch_of_a_frame_brings_all_of_it_up(frames: GpuSpillBuffer, ask: Any) -> None:
    frame = numbers()
    frames["list"] = [frame.copy(), "text"]
    to_disk(frames)
    (proxy, _), count = argument(frames, "list"), frames.counters["disk_to_host"]
    before = count.number, count.nbytes
    assert is_proxy(proxy)
    assert isinstance(proxy, pd.DataFrame)
    assert repr(proxy).startswith("<proxy of pandas.")
    assert (count.number, count.nbytes) == before
    for _ in range(2):
        assert ask(proxy) == ask(frame)
        assert count.number == before[0] + 1
        assert frame.memory_usage(index=False).sum() <= min(count.nbytes - before[1], frames.tiers["host"])


def test_writing_to_a_frame_is_kept(frames: GpuSpillBuffer) -> None:
    frame = numbers()
    proxy = on_disk(frames, frame)
    for x in (frame, proxy):
        x["c1"] = 7.0
        x.loc[3, "c2"] = -1.0
        x["new"] = np.arange(16 * KIB) * 2
    to_disk(frames)
    pd.testing.assert_frame_equal(unproxy(proxy), frame)


def test_frame_is_right_in_every_thread_while_it_moves(frames: GpuSpillBuffer) -> None:
    frame = numbers()
    proxy = on_disk(frames, frame)

    def read(i: int) -> bool:
        right = True
        for k in range(10):
            frames.evict()
            frames.settle(scaled(10))
            name = f"c{(i + k) % 10}"
            right &= proxy[name].equals(frame[name])
        return right

    with ThreadPoolExecutor(4) as pool:
        assert [future.result(scaled(60)) for future in [pool.submit(read, i) for i in range(4)]] == [True] * 4
    assert frames.counters["disk_to_host"].number > 1


def test_a_part_that_cannot_be_read_is_a_fault(frames: GpuSpillBuffer) -> None:
    faults: list[SpillError] = []
    frames.on_fault = faults.append
    proxy = on_disk(frames, numbers())
    for path in Path(frames.disk.folder).iterdir():
        path.write_bytes(b"")
    with pytest.raises(SpillError, match="cut off"):
        proxy["c1"]
    assert len(faults) == 1


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


def test_a_peer_gets_the_bytes_and_nothing_comes_up(store: GpuSpillBuffer, stored: NewStore, gpu: SimGpu) -> None:
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
    other = stored(64 * KIB, 0, jit_unspill=True)
    with store.handing_out_handles():
        other["list"] = store["list"].packed()
    copies = gpu.h2d_copies
    value = argument(other, "list")
    assert isinstance(value[5], SimArray)
    assert gpu.h2d_copies == copies
    assert float(value[5].sum().get()) == 5 * EACH / 8


@pytest.mark.parametrize("jit_unspill", [True, False])
def test_what_is_used_again_and_again_stays_up(stored: NewStore, gpu: SimGpu, jit_unspill: bool) -> None:
    """A clean object was once the first to go, after each use, while what nobody used stayed."""
    store = stored(64 * KIB, 0, jit_unspill=jit_unspill)
    store["hot"] = [array(gpu, 7)]
    for key in "abc":
        store[key] = [array(gpu, 1)]
    assert store.settle()  # hot has gone down
    before = store.counters["host_to_device"].number
    for _ in range(40):
        (value,) = argument(store, "hot")
        assert value.get()[0] == 7
        del value
        assert store.settle()
    assert store.counters["host_to_device"].number == before + 1


@pytest.mark.parametrize("jit_unspill", [True, False])
def test_methods_of_an_object_have_real_arrays(stored: NewStore, gpu: SimGpu, jit_unspill: bool) -> None:
    """Only what is in containers and records comes up one by one with jit_unspill, as proxies."""
    store = stored(64 * KIB, 4 * KIB, jit_unspill=jit_unspill)  # to disk, too
    for n in range(8):
        store[n], store["list", n] = [Model(array(gpu, n))], [array(gpu, n)]
        assert store.settle()
        assert gpu.used_bytes == store.tiers["device"] <= 64 * KIB
    assert [store[n][0].total() for n in range(8)] == [n * EACH / 8 for n in range(8)]
    assert all(is_proxy(store["list", n][0]) == jit_unspill for n in range(8))
