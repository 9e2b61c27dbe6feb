"""Errors of the driver: one that passes costs nothing; after a lasting one the worker is started anew."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from cupy_arrays import filled, on_host
from spill_stores import NewStore, put
from waiting import scaled, until

from hpcgpu.errors import SpillError
from hpcgpu.spill import GpuSpillBuffer

MIB = 1 << 20
Faults = queue.Queue  # of SpillError


@pytest.fixture
def faults() -> Faults[SpillError]:
    return queue.Queue()


@pytest.fixture
def store(new_store: NewStore, faults: Faults[SpillError]) -> GpuSpillBuffer:
    store = new_store(4 * MIB)
    store.on_fault = faults.put
    put(store, range(8), lambda i: filled(MIB, i))
    return store


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync=906", "cuEventRecord=900", "cuCtxPushCurrent=201"])
def test_a_value_whose_copy_up_fails_once_is_read_again(
    store: GpuSpillBuffer, faults: Faults[SpillError], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", call)
    with pytest.raises(Exception, match=call.partition("=")[0] + " of the CUDA driver fails"):
        store[0]
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    assert (on_host(store[0]) == 0).all()
    assert faults.empty()


def test_copies_down_go_on_when_an_error_has_passed(
    store: GpuSpillBuffer, faults: Faults[SpillError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuCtxRecordEvent=900")
    store[8] = filled(MIB, 8)
    until(lambda: store.trouble, "the failure is said", limit_s=30)
    assert "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" in store.trouble[0]
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    until(lambda: not store.trouble, "what waited has moved", limit_s=30)
    assert store.settle(scaled(30))
    assert store.tiers["device"] <= 4 * MIB
    assert faults.empty()


@pytest.mark.parametrize("code", [700, 719])
def test_a_lost_gpu_is_said_in_cudas_words(
    store: GpuSpillBuffer, faults: Faults[SpillError], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    new = filled(MIB, 8)
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"cuCtxRecordEvent={code}")
    store[8] = new
    said = str(faults.get(timeout=scaled(30)))
    assert said.startswith(
        "the GPU cannot be used any more by this process: cuCtxRecordEvent of the CUDA driver fails: "
    )
    assert said.endswith({700: "CUDA_ERROR_ILLEGAL_ADDRESS", 719: "CUDA_ERROR_LAUNCH_FAILED"}[code])


def test_a_task_that_loses_the_gpu_is_noticed(
    store: GpuSpillBuffer, faults: Faults[SpillError], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    def task() -> Any:
        monkeypatch.setenv("FAKE_CUDA_FAIL", "cuStreamSynchronize=700")
        with store.using([7]):
            cupy.cuda.Stream.null.synchronize()

    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
        task()
    assert "cannot be used any more by this process: cudaError700" in str(faults.get(timeout=scaled(30)))
