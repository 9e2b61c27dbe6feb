"""Whatever a step raises, the steps after it are made: no copy vanishes, and nobody waits for ever."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from spill_stores import KIB, FaultyGpu, NewStore, fill, filled
from waiting import aside, scaled, until

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices import AllocationFailureHook
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.values.unit import Buffer

LIMIT = 64 * KIB


class Wordless(RuntimeError):
    """An error that has no text, and is not even true or false."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise ValueError("neither")


@pytest.fixture
def gpu() -> FaultyGpu:
    return FaultyGpu(1024 * KIB)


def assert_moves(store: GpuSpillBuffer, keys: range = range(40)) -> None:
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
    assert_moves(store)


def test_a_copy_up_that_fails_with_an_error_without_text_fails(
    store: GpuSpillBuffer, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable(OSError):
        __str__ = Wordless.__str__

    filled(store, gpu)
    (key,) = [k for k in store if store._entries[k].units[0].tier == 0][:1]

    def read(*_: Any) -> Any:
        raise Unreadable

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "read", read)
        error = aside(lambda: store[key]).exception(20)
    assert str(error) == f"the value of {key!r} cannot be read back from disk: Unreadable"
    assert store.settle(scaled(20))


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
    assert_moves(store)


@pytest.mark.parametrize("function", ["bytes_up", "put"])
def test_a_copy_whose_result_cannot_be_kept_fails(
    function: str, store: GpuSpillBuffer, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be under way for ever."""

    def broken(*_: Any) -> Any:
        raise KeyError("disk_to_device")

    filled(store, gpu)
    (key,) = [k for k in store if store._entries[k].units[0].tier == 0][:1]
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, function, broken)
        assert isinstance(aside(lambda: store[key]).exception(20), KeyError)
    assert store._executor.state.accounting.moves == 0
    assert_moves(store)


def test_interrupted_reader_does_not_block_other_readers(stored: NewStore, gpu: FaultyGpu) -> None:
    store = stored(1024 * KIB, None, jit_unspill=False)
    store["a"] = [gpu.asarray(np.full(8 * KIB, i, "u1")) for i in range(4)]
    store._executor.report(store._executor.state.limit, 2, 1)
    assert store.settle(scaled(20))
    assert store.tiers["device"] == 0
    gpu.up = KeyboardInterrupt()
    assert isinstance(aside(lambda: store["a"]).exception(20), KeyboardInterrupt)
    gpu.up = None
    assert store._executor.state.accounting.moves == 0
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
    assert_moves(store)


def test_spill_thread_does_not_wait_for_room_it_cannot_make(stored: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes up ahead has no room where others have the device's memory: copies down came a second late."""
    monkeypatch.setattr(AllocationFailureHook, "patience_s", 30.0)
    gpu = SimGpu(200 * KIB)
    store = stored(150 * KIB, 300 * KIB, target=1.0)
    for i in range(8):
        store[i] = gpu.asarray(np.full(30 * KIB, i, "u1"))
    assert store.settle(scaled(20))
    low = [key for key in store if store._entries[key].units[0].tier == 1]
    for key in [key for key in store if key not in low][:3]:
        del store[key]
    others = gpu.empty(gpu.memory_bytes - gpu.used_bytes - 10 * KIB, "u1")
    store.expect("task", low, (1,), running=False)
    store["big"] = np.full(290 * KIB, 1, "u1")
    until(lambda: store.tiers["disk"] > 0, "a copy goes down beside it", limit_s=10)
    assert store.counters["host_to_device"].number == 0
    del others
