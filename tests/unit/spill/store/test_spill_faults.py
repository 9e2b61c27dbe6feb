"""No key is lost, no copy vanishes and nobody waits for ever, whatever a step raises."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import cloudpickle
import numpy as np
import pytest
from paths import ROOT, SUPPORT
from spill_stores import KIB, FaultyGpu, NewStore, Odd, fill, filled, put
from waiting import aside, scaled, until

from hpcgpu.deploy.bug_report import Scrubber
from hpcgpu.errors import SpillError
from hpcgpu.sim import OutOfMemoryError, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices import allocation_failure
from hpcgpu.spill.devices.allocation_failure import AllocationFailureHook
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.handles import Handle
from hpcgpu.spill.values.unit import Buffer

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
LIMIT = 64 * KIB


@pytest.fixture
def gpu() -> FaultyGpu:
    return FaultyGpu(1024 * KIB)


class Sizeless:
    """A value that dask cannot measure."""

    def __sizeof__(self) -> int:
        raise RuntimeError("nobody knows")


def refuse() -> Any:
    raise RuntimeError("not this one")


def test_what_is_logged_keeps_no_value(store: GpuSpillBuffer, gpu: FaultyGpu, caplog: pytest.LogCaptureFixture) -> None:
    """Log handlers may keep their records for long, as distributed's does, and records what they are made of."""
    gpu.down = RuntimeError("cudaErrorIllegalAddress")
    fill(store, gpu)
    store["sizeless"] = Sizeless()
    store["unpicklable"] = Odd(2 << 20, refuse)
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
    answer = aside(lambda: allocation_failure.evict(0, 8 * KIB))
    until(lambda: store._executor.state.allocations, "the allocation waits", answer)
    gpu.go_on.set()
    assert answer.result(scaled(20))
    assert not allocation_failure.evict(0, 8 * KIB)
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


def test_room_is_made_until_it_is_enough(stored: NewStore) -> None:
    """What has gone may have lain in pieces, or another thread was faster."""
    gpu, store = SimGpu(100 * KIB), stored(1.0, None)
    collected: list[int] = []

    def allocate(most_bytes: int) -> int:
        if gpu.used_bytes > most_bytes:
            raise MemoryError
        return gpu.used_bytes

    fill(store, gpu, 10)
    got = allocation_failure.with_room(
        gpu, 8 * KIB, lambda: allocate(40 * KIB), lambda: collected.append(gpu.used_bytes)
    )
    assert got == 40 * KIB
    assert collected == [n * 8 * KIB for n in (9, 8, 7, 6, 5)]
    with pytest.raises(MemoryError):
        allocation_failure.with_room(gpu, 8 * KIB, lambda: allocate(-1), gc.collect)
    assert gpu.used_bytes == 0
    assert [store[i].get()[0] for i in range(10)] == list(range(10))
    store.close()
    with pytest.raises(MemoryError):
        allocation_failure.with_room(gpu, 8 * KIB, lambda: allocate(-1), gc.collect)


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


def test_a_peer_gets_host_values_while_they_go_to_disk(stored: NewStore) -> None:
    store = stored(0, 1024)  # everything goes to disk at once
    for i in range(5):
        store[i] = np.full(100_000, i, "u1")
    for _ in range(100):
        for i in range(5):
            with store.handing_out_handles():
                found = store[i]
            value = found.packed().unpack() if isinstance(found, Handle) else found
            assert value[-1] == i


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


def test_a_class_that_came_by_value(stored: NewStore) -> None:
    """What a client's script defines is no attribute of the worker's __main__."""
    made = type("FromScript", (), {"__module__": "__main__", "__sizeof__": lambda self: 80_000})
    value = cloudpickle.loads(cloudpickle.dumps(made))()
    value.data = np.arange(10_000)
    store = stored(0, 1024)
    store["x"] = value
    del value
    assert store.settle(scaled(10))
    assert store.tiers["disk"] >= 80_000
    assert store["x"].data.sum() == 49_995_000
    assert type(store["x"]) is made


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
    assert executor.state.moves == 0
    assert set(store["a"].get()) == {1}


# --- each reader gets an error of its own, which keeps nothing of other readers


def fails(_: Any) -> None:
    try:
        raise KeyError("the first")
    except KeyError as error:
        raise ValueError("not this one") from error


def test_a_lost_value_keeps_nothing_of_its_readers(stored: NewStore, gpu: SimGpu) -> None:
    store = stored(0, 40 * KIB, target=1.0)
    store["lost"] = Odd(50 * KIB, lambda: (fails, (np.zeros(50 * KIB, "u1"),)))
    assert store.settle(scaled(20))

    def task() -> Any:
        workspace = gpu.empty(100 * KIB, "u1")
        return store["lost"], workspace

    texts = []
    for _ in range(3):
        try:  # not pytest.raises, which keeps the traceback
            task()
        except SpillError as error:
            texts.append("".join(traceback.format_exception(error)))
            step = error.__cause__
            while step is not None:  # what was kept
                assert step.__traceback__ is None
                step = step.__cause__
    gc.collect()
    assert gpu.used_bytes == 0
    assert store.disk.slabs._held_bytes == store.disk.slabs.free_bytes
    assert len(texts) == 3 and all("'lost' cannot be read back from disk: it cannot be unpickled" in t for t in texts)
    assert all(text.count("in task") == 1 for text in texts)


class Shared(Exception):
    """An error that cannot be made again from its arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__("it is broken")
        self.code = code


@pytest.mark.parametrize(
    ("error", "kind"), [(OutOfMemoryError("no room"), OutOfMemoryError), (Shared(code=3), SpillError)]
)
def test_readers_of_one_value_get_an_error_each(
    stored: NewStore, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type
) -> None:
    store, go_on = stored(100 * KIB), threading.Event()

    def unpack(*_: Any) -> Any:
        assert go_on.wait(scaled(20))
        raise error

    put(store, range(5), lambda i: gpu.asarray(np.zeros(40 * KIB, "u1")))
    (unit,) = store._entries[0].units
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "unpack", unpack)
        readers = [aside(lambda: store[0]) for _ in range(3)]
        until(lambda: len(unit.waiters) == 3, "three readers wait")
        go_on.set()
        found = [done.exception(20) for done in readers]
    assert len({id(each) for each in found}) == 3
    assert {type(each) for each in found} <= {kind, type(error)}  # distributed's tblib makes such errors again, too
    for each in found:
        assert each is not None and each is not error
        assert str(error) in str(each)
        chain = [step for step in (each.__cause__, each.__context__) if step is not None]
        assert all(step.__traceback__ is None for step in chain)
    assert store[0].get()[0] == 0


# --- the steps after one that raised are made


class Wordless(RuntimeError):
    """An error that has no text, and is not even true or false."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise ValueError("neither")


def assert_moves_on(store: GpuSpillBuffer, keys: range = range(40)) -> None:
    until(lambda: store.tiers["device"] <= LIMIT, "what is above the limit goes down", limit_s=20)
    assert store.settle(scaled(20))
    assert aside(lambda: [int(store[i].get()[0]) for i in keys]).result(scaled(20)) == list(keys)


class End(BaseException):
    """An end of a copy that has no text."""

    __repr__ = Wordless.__str__
    __str__ = Wordless.__str__


@pytest.mark.parametrize(("error", "why"), [(Wordless(), "Wordless"), (End(), "a copy was interrupted: End")])
def test_copy_down_with_an_error_without_text_fails(
    store: GpuSpillBuffer, gpu: FaultyGpu, caplog: pytest.LogCaptureFixture, error: BaseException, why: str
) -> None:
    gpu.down = error
    fill(store, gpu)
    until(lambda: f"cannot be moved down: {why}" in caplog.text, "the failure is logged")
    assert store.trouble == (why,)
    gpu.down = None
    assert_moves_on(store)


def test_a_copy_up_that_fails_with_an_error_without_text_fails(
    store: GpuSpillBuffer, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(OSError):
        __str__ = Wordless.__str__

    filled(store, gpu)
    (key,) = [k for k in store if store._entries[k].units[0].tier == 0][:1]

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "read", Mock(side_effect=Unreadable))
        error = aside(lambda: store[key]).exception(20)
    assert str(error) == f"the value of {key!r} cannot be read back from disk: Unreadable"
    assert store.settle(scaled(20))


def test_story_of_a_lost_value_is_logged_and_replays(
    store: GpuSpillBuffer, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "distributed.worker.memory")
    filled(store, gpu)
    key = next(k for k in store if store._entries[k].units[0].tier == 0)
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "read", Mock(side_effect=OSError("secret")))
        assert isinstance(aside(lambda: store[key]).exception(20), SpillError)
    story = "".join(f"12:00:00 - {line}\n" for line in caplog.messages if line.startswith("spill story"))
    assert "secret" not in story and Scrubber({"user": ["ann"]}).scrub(story) == story  # hpcgpu report

    def replay(text: str) -> str:
        argv, env = (sys.executable, ROOT / "scripts" / "replay_spill.py", "/dev/stdin"), f"{ROOT}:{SUPPORT}"
        done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": env}, input=text, capture_output=True, text=True)
        return f"{done.stdout}{done.stderr}{done.returncode}"

    assert re.fullmatch(r"process \d+: \d+ events replayed exactly, and all keep the laws\n0", replay(story))
    unnamed = f'spill story of process {os.getpid()}: [["need",1,[{1 << 40}],false,false,false,false]]\n'
    assert re.search("a unit that no key names cannot be needed\n1", replay(story + unnamed))


@pytest.fixture
def broken_log() -> Iterator[None]:
    """A filter of the user's that raises."""

    def broken(record: logging.LogRecord) -> bool:
        if "stay in the" in record.msg:
            raise RuntimeError("this filter is broken")
        return True

    log = logging.getLogger("distributed.worker.memory")
    log.addFilter(broken)
    yield
    log.removeFilter(broken)


@pytest.mark.usefixtures("broken_log")
def test_a_log_filter_that_raises_stops_no_move(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    gpu.down = RuntimeError("cudaErrorIllegalAddress")
    fill(store, gpu)
    until(lambda: store.trouble, "the failure is known")
    gpu.down = None
    assert_moves_on(store)


@pytest.mark.parametrize("function", ["bytes_up", "put"])
def test_a_copy_whose_result_cannot_be_kept_fails(
    function: str, store: GpuSpillBuffer, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be under way for ever."""
    filled(store, gpu)
    (key,) = [k for k in store if store._entries[k].units[0].tier == 0][:1]
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, function, Mock(side_effect=KeyError("disk_to_device")))
        assert isinstance(aside(lambda: store[key]).exception(20), KeyError)
    assert store._executor.state.moves == 0
    assert_moves_on(store)


def test_interrupted_reader_does_not_block_other_readers(stored: NewStore, gpu: FaultyGpu) -> None:
    store = stored(1024 * KIB, None, jit_unspill=False)
    store["a"] = [gpu.asarray(np.full(8 * KIB, i, "u1")) for i in range(4)]
    store._executor.report(store._executor.state.limit, 2, 1)
    assert store.settle(scaled(20))
    assert store.tiers["device"] == 0
    gpu.up = KeyboardInterrupt()
    assert isinstance(aside(lambda: store["a"]).exception(20), KeyboardInterrupt)
    gpu.up = None
    assert store._executor.state.moves == 0
    assert aside(lambda: [int(x.get()[0]) for x in store["a"]]).result(scaled(20)) == [0, 1, 2, 3]
    assert store.settle(scaled(20))


def test_an_interrupt_between_two_instructions_loses_none(
    store: GpuSpillBuffer, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes anywhere; here, before each copy that a set gives the spill thread."""
    send = Executor._send_to_spill_thread

    def interrupted(self: Executor, copy: Any) -> None:
        send(self, copy)
        raise KeyboardInterrupt

    store["first"] = gpu.asarray(np.zeros(1 * KIB, "u1"))  # now the store knows the device
    store._executor.report(store._executor.state.limit, 2, 1024 * KIB)
    fill(store, gpu)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_send_to_spill_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store._executor.report(store._executor.state.limit, 2, LIMIT)
    assert_moves_on(store)


def test_spill_thread_does_not_wait_for_room_it_cannot_make(stored: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes up ahead has no room where others have the device's memory: copies down came a second late."""
    monkeypatch.setattr(AllocationFailureHook, "patience_s", 30.0)
    gpu = SimGpu(200 * KIB)
    store = stored(150 * KIB, 300 * KIB, target=1.0)
    put(store, range(8), lambda i: gpu.asarray(np.full(30 * KIB, i, "u1")))
    low = [key for key in store if store._entries[key].units[0].tier == 1]
    for key in [key for key in store if key not in low][:3]:
        del store[key]
    others = gpu.empty(gpu.memory_bytes - gpu.used_bytes - 10 * KIB, "u1")
    store.expect("task", low, (1,), running=False)
    store["big"] = np.full(290 * KIB, 1, "u1")
    until(lambda: store.tiers["disk"] > 0, "a copy goes down beside it", limit_s=10)
    assert store.counters["host_to_device"].number == 0
    del others
