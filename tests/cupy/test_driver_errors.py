"""Errors of the driver: one that passes costs nothing; after a lasting one the worker is started anew."""

import asyncio
import pickle
import queue
from pathlib import Path
from typing import Any

import pytest
from cupy_arrays import filled, on_host
from distributed import get_worker
from fake_cuda import Standin
from spill_stores import NewStore, put
from store_clusters import cluster
from waiting import scaled, until

from hpcgpu.errors import SpillError
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.store.handles import Handle

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


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync=906", "cuEventRecord=900", "cuCtxGetCurrent=201"])
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


def test_a_lost_gpu_is_noticed_in_an_error_of_the_users(
    store: GpuSpillBuffer, faults: Faults[SpillError], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuStreamSynchronize=700")
    with pytest.raises(KeyError), store.using([7]):
        try:
            cupy.cuda.Stream.null.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as e:
            raise KeyError("no such row") from e
    assert "cannot be used any more by this process: 'no such row'" in str(faults.get(timeout=scaled(30)))


@pytest.mark.parametrize(("code", "is_lost"), [(719, True), (999, True), (2, False), (906, False)])
def test_the_driver_is_asked_after_any_error_of_a_task(
    store: GpuSpillBuffer, faults: Faults[SpillError], driver: Standin, code: int, is_lost: bool
) -> None:
    driver.lose(code)  # RMM and cuDF raise a RuntimeError with a text, and cuda.core a class of its own
    with pytest.raises(RuntimeError), store.using([]):
        raise RuntimeError("Fatal CUDA error encountered at: stream_ordered.hpp:213")
    driver.mend()
    for _ in range(is_lost):
        said = str(faults.get(timeout=scaled(30)))
        assert said.endswith("answers CUDA_ERROR_UNKNOWN after Fatal CUDA error encountered at: stream_ordered.hpp:213")
    assert faults.empty()


def test_values_on_host_and_disk_outlive_the_gpu(new_store: NewStore, driver: Standin) -> None:
    store = new_store(4 * MIB, 5 * MIB)  # for the host tier 3 MiB
    put(store, range(12), lambda i: filled(MIB, i))
    assert store.settle(scaled(30))
    assert min(store.tiers.values()) >= 2 * MIB
    driver.lose(719)
    with store.handing_out_handles():
        below = {i: each for i in range(12) if isinstance(each := store[i], Handle)}
    assert len(below) * MIB == store.tiers["host"] + store.tiers["disk"]
    for i, handle in below.items():
        assert bytes([i]) * MIB in pickle.dumps(handle.packed())
    driver.mend()


def compute(i: int) -> Any:
    if i == 0:
        Standin().lose(719)
        raise RuntimeError("CUDA error encountered")
    return get_worker().name


async def test_a_worker_without_its_gpu_runs_no_more_tasks(driver: Standin, tmp_path: Path) -> None:
    """It leaves once; the tasks that it has already run elsewhere."""
    async with cluster(tmp_path, plugin=True) as (client, a, b):
        left: list[str] = []
        leave = a.close_gracefully

        async def leave_late(*args: Any, **options: Any) -> None:
            left.append(a.status.name)
            await asyncio.to_thread(until, lambda: not a.state.executing, "what runs has ended", limit_s=30)
            driver.mend()  # both workers are in this process
            await leave(*args, **options)

        a.close_gracefully = leave_late
        here = {"workers": ["a"], "allow_other_workers": True}
        tasks = client.map(compute, range(60), **here)
        with pytest.raises(RuntimeError, match="CUDA error encountered"):
            await tasks[0]
        places = await client.gather(tasks[1:])
        assert places.count("a") <= 2 * a.state.nthreads  # what ran beside it, or was over before
        await a.finished()
        assert (left, b.status.name) == (["paused"], "running")
