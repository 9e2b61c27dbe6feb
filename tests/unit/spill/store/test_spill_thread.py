"""The spill thread goes on after any error, and no caller is told that all is well while it cannot."""

import errno
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spill_stores import KIB, FaultyGpu, NewStore, Odd, assert_moves, fill, filled, put
from waiting import scaled, until

from hpcgpu.spill import GpuSpillBuffer

LIMIT = 64 * KIB


class FaultyDevice(FaultyGpu):
    """A device whose library raises in each round of the spill thread, if it is ``broken``."""

    waste, broken = (), False

    def empty_bin(self) -> None:
        if self.broken:
            raise RuntimeError("cudaErrorContextIsDestroyed")


@pytest.fixture
def gpu() -> FaultyDevice:
    return FaultyDevice(1024 * KIB)


def test_a_round_that_raises_is_said_and_the_next_one_comes(
    store: GpuSpillBuffer, gpu: FaultyDevice, caplog: pytest.LogCaptureFixture
) -> None:
    store["first"] = gpu.asarray(np.zeros(KIB, "u1"))
    gpu.broken = True
    fill(store, gpu)
    until(lambda: "cudaErrorContextIsDestroyed" in caplog.text, "the failure is said")
    assert not store.settle(0.2)
    until(lambda: store.tiers["device"] <= LIMIT, "what is above the limit goes down all the same")
    (said,) = [r for r in caplog.records if "ContextIsDestroyed" in r.getMessage()]
    assert said.getMessage().startswith("the spill thread failed, and goes on in")
    assert said.exc_info
    gpu.broken = False
    assert_moves(store, gpu)


def test_what_ends_threads_does_not_end_the_mover(
    store: GpuSpillBuffer, gpu: FaultyGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """Pickling runs user code, which may say exit()."""
    store["leaves"] = Odd(100 * KIB, lambda: sys.exit(3))
    until(lambda: "SystemExit" in caplog.text, "the end of the thread is said")
    del store["leaves"]
    assert_moves(store, gpu)


def test_prefetch_that_fails_in_a_library_stops_no_move(store: GpuSpillBuffer, gpu: FaultyGpu) -> None:
    filled(store, gpu)
    for i in range(39, 31, -1):
        del store[i]
    gpu.up = RuntimeError("cudaErrorIllegalAddress")
    store.expect("task", [0], (0,), running=False)
    assert store.settle(scaled(20))
    assert store.counters["host_to_device"].number + store.counters["disk_to_host"].number <= 1
    gpu.up = None
    assert_moves(store, gpu)


def test_a_file_that_cannot_be_removed_stops_no_move(
    store: GpuSpillBuffer, gpu: FaultyGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(store, gpu)
    unlink = Path.unlink

    def stale(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.parent == store.disk.folder:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        unlink(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stale)
        store.clear()
        store["last"] = gpu.asarray(np.zeros(KIB, "u1"))
        until(lambda: "Stale file handle" in caplog.text, "the failure is said")
        assert_moves(store, gpu)
    assert caplog.text.count("cannot be removed") == 1
    store.clear()
    until(lambda: not [p for p in store.disk.folder.iterdir() if p.name.isdigit()], "the files are gone")


def test_nobody_is_woken_after_the_end(stored: NewStore) -> None:
    """Distributed asks a closed worker's store for its numbers, again and again."""
    store = stored(0, 100 * KIB, target=1.0)
    put(store, range(20), lambda i: np.full(20_000, i, "u1"))
    store.close()
    assert store.settle(0.1)
    left = store._executor.inbox.qsize()
    for _ in range(10):
        assert store.tiers["disk"] == 0
        store.evict()
    assert store._executor.inbox.qsize() == left


def test_a_tier_that_has_room_again_is_in_trouble_no_more(
    store: GpuSpillBuffer, gpu: FaultyGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """The device was mended, and what did not move is gone: metrics and the summary went on to tell of the error."""
    caplog.set_level("INFO", "distributed.worker.memory")
    gpu.down = RuntimeError("cudaErrorIllegalAddress")
    fill(store, gpu)
    until(lambda: store.trouble, "the failure is said")
    store.clear()
    until(lambda: not store.trouble, "no tier is above its limit", limit_s=10)
    assert "the device tier is below its limit again" in caplog.text
    fill(store, gpu)  # the same in the same minute is in the metrics, and not said twice
    until(lambda: store.trouble, "the failure is known again")
    gpu.down = None
    assert caplog.text.count("cudaErrorIllegalAddress") == 1
    until(lambda: not store.trouble, "the device moves again", limit_s=10)
    assert_moves(store, gpu)
