"""No key is lost: copies that fail, sets and deletes in the middle of a move, folders of others, forked children."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import cloudpickle
import numpy as np
import pytest
from spill_stores import KIB, FaultyGpu, fill, filled
from waiting import aside, scaled, until

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer, devices
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.store import Handle


@pytest.fixture
def gpu() -> FaultyGpu:
    return FaultyGpu(1024 * KIB)


class Sizeless:
    """A value that dask cannot measure."""

    def __sizeof__(self) -> int:
        raise RuntimeError("nobody knows")


class Unpicklable:
    """A value that can be measured, and not be pickled."""

    def __sizeof__(self) -> int:
        return 2 << 20

    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")


def test_what_is_logged_keeps_no_value(store: GpuSpillBuffer, gpu: FaultyGpu, caplog: pytest.LogCaptureFixture) -> None:
    """Log handlers may keep their records for long, as distributed's does, and records what they are made of."""
    gpu.down = RuntimeError("cudaErrorIllegalAddress")
    fill(store, gpu)
    store["sizeless"] = Sizeless()
    store["unpicklable"] = Unpicklable()
    left = [weakref.ref(store[key]) for key in store]
    for said in ("cudaErrorIllegalAddress", "not this one"):
        until(lambda: said in caplog.text, f"{said} is said")  # noqa: B023 - called at once
    assert "nobody knows" in caplog.text
    store.clear()
    gc.collect()
    until(lambda: gc.collect() >= 0 and not any(made() is not None for made in left), "all values are gone", limit_s=10)


def test_an_allocation_waits_for_what_another_thread_moves(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    """RMM does not ask again after a no."""
    gpu.waits = True
    store["a"] = gpu.asarray(np.full(80 * KIB, 1, "u1"))
    assert gpu.under_way.wait(scaled(20))
    answer = aside(lambda: devices.evict(0, 8 * KIB))
    until(lambda: store._executor.state.allocations.waiting, "the allocation waits", answer)
    gpu.go_on.set()
    assert answer.result(scaled(20))
    assert not devices.evict(0, 8 * KIB)
    assert gpu.used_bytes == 0


def test_what_user_code_writes_to_while_it_moves_is_not_lost(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    """As get_worker().data["a"] in another thread: the copy that is under way may have taken the old numbers."""
    pack = gpu.pack
    begun, go_on = threading.Event(), threading.Event()

    def copy_and_wait(*arguments: Any) -> Any:
        copied = pack(*arguments)
        begun.set()
        assert go_on.wait(scaled(20))
        return copied

    gpu.pack = copy_and_wait  # type: ignore[method-assign]
    store["a"] = gpu.asarray(np.full(80 * KIB, 1, "u1"))
    assert begun.wait(scaled(20))
    store["a"][...] = 7
    go_on.set()
    assert store.settle(scaled(20))
    assert store.tiers["device"] == 0
    assert set(store["a"].get()) == {7}


def test_room_is_made_until_it_is_enough(tmp_path: Path) -> None:
    """What has gone may have lain in pieces, or another thread was faster."""
    gpu = SimGpu(100 * KIB)
    store = GpuSpillBuffer(1.0, None, str(tmp_path))
    collected: list[int] = []

    def allocate(most_bytes: int) -> int:
        if gpu.used_bytes > most_bytes:
            raise MemoryError
        return gpu.used_bytes

    def collect() -> None:
        collected.append(gpu.used_bytes)

    try:
        fill(store, gpu, 10)
        assert devices.with_room(gpu, 8 * KIB, lambda: allocate(40 * KIB), collect) == 40 * KIB
        assert collected == [n * 8 * KIB for n in (9, 8, 7, 6, 5)]
        with pytest.raises(MemoryError):
            devices.with_room(gpu, 8 * KIB, lambda: allocate(-1), collect)
        assert gpu.used_bytes == 0
        assert [store[i].get()[0] for i in range(10)] == list(range(10))
    finally:
        store.close()
    with pytest.raises(MemoryError):
        devices.with_room(gpu, 8 * KIB, lambda: allocate(-1), collect)


def test_set_and_delete_while_a_value_moves(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    gpu.waits = True
    store["a"] = gpu.asarray(np.full(80 * KIB, 1, "u1"))
    assert gpu.under_way.wait(scaled(20))
    store["a"] = new = gpu.asarray(np.full(8 * KIB, 2, "u1"))
    assert store["a"] is new
    gpu.waits = False
    gpu.go_on.set()
    assert store.settle(scaled(10))
    assert store["a"].get()[0] == 2
    assert sum(store.tiers.values()) < 10 * KIB
    del store["a"], new
    assert gpu.used_bytes == sum(store.tiers.values()) == 0


def test_two_names_of_which_one_is_set_while_the_other_moves(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    gpu.waits = True
    x = gpu.asarray(np.arange(40 * KIB, dtype="u2"))
    store["a"] = x
    assert gpu.under_way.wait(scaled(20))
    store["b"] = x
    store["c"] = [x[5:]]
    gpu.waits = False
    gpu.go_on.set()
    del x
    assert store.settle(scaled(10))
    for value in (store["a"], store["b"]):
        np.testing.assert_array_equal(value.get(), np.arange(40 * KIB, dtype="u2"))
    assert store["c"][0].get()[0] == 5


def test_a_handle_outlives_its_key(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    """A key is released while a peer is sent its value, and comes back under another name."""
    filled(store, gpu)
    with store.handing_out_handles():
        handle = store[0]
    assert isinstance(handle, Handle)
    store.clear()
    assert 8 * KIB <= sum(store.tiers.values()) < 9 * KIB  # it is still there, and counts
    assert handle.packed().unpack().get()[0] == 0
    store["again"] = handle
    assert sum(store.tiers.values()) >= 8 * KIB
    filled(store, gpu)
    assert store["again"].get().sum() == 0
    del handle
    store.clear()
    assert store.settle(scaled(10))  # what was just going down
    assert sum(store.tiers.values()) == 0


def test_a_peer_gets_host_values_while_they_go_to_disk(tmp_path: Path) -> None:
    store = GpuSpillBuffer(0, 1024, str(tmp_path))  # everything goes to disk at once
    for i in range(5):
        store[i] = np.full(100_000, i, "u1")
    for _ in range(100):
        for i in range(5):
            with store.handing_out_handles():
                found = store[i]
            value = found.packed().unpack() if isinstance(found, Handle) else found
            assert value[-1] == i
    store.close()


def test_stores_of_one_process_share_a_device(tmp_path: Path) -> None:
    gpu = SimGpu(100 * KIB)
    stores = [GpuSpillBuffer(40 * KIB, None, str(tmp_path)) for _ in range(2)]
    for i in range(20):
        stores[i % 2][i] = gpu.asarray(np.full(8 * KIB, i, "u1"))
    for store in stores:
        assert store.settle(scaled(10))
        assert store.tiers["device"] <= 40 * KIB
    big = gpu.empty(95 * KIB, "u1")
    stores[0].close()
    del big
    assert gpu.on_alloc_failure is not None
    assert [stores[1][i].get()[0] for i in range(1, 20, 2)] == list(range(1, 20, 2))
    stores[1].close()
    stores[1].close()
    assert gpu.on_alloc_failure is None
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Awkward:
    """A dataclass that cannot be copied."""

    array: Any

    def __copy__(self) -> Awkward:
        raise RuntimeError("only one of me")


def test_odd_containers(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    x = gpu.asarray(np.arange(3000.0))
    store["awkward"] = Awkward(x)  # a set must not raise: distributed would hang
    store["empties"] = [gpu.asarray(np.zeros(0)), np.zeros(0), np.zeros((0, 3)), np.zeros(30_000), x]
    del x
    filled(store, gpu)
    assert store["awkward"].array.get()[2] == 2
    with store.handing_out_handles():
        sent = store["empties"]
    empties = sent.packed().unpack() if isinstance(sent, Handle) else sent
    assert [type(e).__name__ for e in empties] == ["SimArray", "ndarray", "ndarray", "ndarray", "SimArray"]
    assert [e.shape for e in empties] == [(0,), (0,), (0, 3), (30_000,), (3000,)]


def test_a_class_that_came_by_value(tmp_path: Path) -> None:
    """What a client's script defines is no attribute of the worker's __main__."""
    made = type("FromScript", (), {"__module__": "__main__", "__sizeof__": lambda self: 80_000})
    value = cloudpickle.loads(cloudpickle.dumps(made))()
    value.data = np.arange(10_000)
    store = GpuSpillBuffer(0, 1024, str(tmp_path))
    store["x"] = value
    del value
    assert store.settle(scaled(10))
    assert store.tiers["disk"] >= 80_000
    assert store["x"].data.sum() == 49_995_000
    assert type(store["x"]) is made
    store.close()


def test_many_that_start_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    (tmp_path / "hpcgpu-spill-of-somebody").mkdir()
    start = threading.Barrier(8)
    made: list[Disk] = []

    def work() -> None:
        start.wait(scaled(20))
        made.extend(Disk(str(tmp_path)) for _ in range(10))

    for done in [aside(work) for _ in range(8)]:
        done.result(scaled(60))
    assert len({d.folder for d in made}) == 80
    assert all((d.folder / ".lock").exists() for d in made)
    for d in made:
        d.close()
    assert [p.name for p in tmp_path.iterdir()] == ["hpcgpu-spill-of-somebody"]


def test_a_folder_without_a_lock_is_removed_if_empty(tmp_path: Path) -> None:
    first = Disk(str(tmp_path))
    twin = first.folder.with_name(f"{first.folder.name[:-8]}12345678")
    full = first.folder.with_name(f"{first.folder.name[:-8]}abcdefgh")
    twin.mkdir()
    full.mkdir()
    (full / "unknown").touch()
    second = Disk(str(tmp_path))
    assert not twin.exists()
    assert full.exists()
    first.close()
    second.close()


FORK = """
import os, sys
import numpy as np
from hpcgpu.spill import GpuSpillBuffer
store = GpuSpillBuffer(0, 1024, sys.argv[1])
store["x"] = np.arange(100_000)
store.settle(10)
if not (child := os.fork()):
    del store
    sys.exit()
os.waitpid(child, 0)
print(store.tiers["disk"] > 0, store["x"].sum(), len(os.listdir(sys.argv[1])))
"""


def test_only_the_parents_end_removes_the_spill_folder(tmp_path: Path) -> None:
    argv = [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60))
    assert (done.stdout, done.stderr) == ("True 4999950000 1\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_nobody_closes_goes_with_its_last_reference(tmp_path: Path, gpu: FaultyGpu) -> None:
    store = GpuSpillBuffer(64 * KIB, 64 * KIB, str(tmp_path))
    fill(store, gpu)
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert (gpu.used_bytes, gpu.on_alloc_failure) == (0, None)


def test_copy_at_the_spill_threads_end_is_given_up(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    """No thread would make it, and readers of its value would wait for ever."""

    class Late(SimpleQueue):
        """Has the store closed between the look whether it is and the copy."""

        def put(self, item: Any) -> None:
            if item is not None:
                thread.close(os.getpid())
            inbox.put(item)

        def get_nowait(self) -> Any:
            return inbox.get_nowait()

    executor, thread = store._executor, store._spill_thread
    inbox, executor.inbox = executor.inbox, Late()
    store["a"] = gpu.asarray(np.full(80 * KIB, 1, "u1"))
    assert executor.state.accounting.moves == 0
    assert set(store["a"].get()) == {1}
