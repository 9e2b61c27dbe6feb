"""A value that is only read is not copied twice, and values that tasks need next are up when they start."""

from __future__ import annotations

import numpy as np
import pytest
from spill_stores import KIB, NewStore, argument

from hpcgpu.sim import SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer


@pytest.fixture
def store(stored: NewStore) -> GpuSpillBuffer:
    return stored(64 * KIB, 0)


def array(gpu: SimGpu, number: int, kib: int = 20) -> SimArray:
    return gpu.asarray(np.full(kib * KIB // 8, float(number)))


def fill(store: GpuSpillBuffer, gpu: SimGpu, keys: str) -> None:
    for i, key in enumerate(keys):
        store[key] = array(gpu, i)
        assert store.settle()


def run_task(store: GpuSpillBuffer, key: str) -> float:
    return float(argument(store, key).sum().get())


def test_what_a_task_has_read_goes_down_again_without_a_copy(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(store, gpu, "abcdef")  # room for three
    for _ in range(5):
        for i, key in enumerate("abcdef"):
            assert run_task(store, key) == i * 20 * KIB / 8
            assert store.settle()
    each = 20 * KIB
    assert gpu.d2h_bytes <= 6 * each + 30 * 8  # each at most once, and the sums
    assert gpu.h2d_bytes >= 6 * each + 12 * each  # though they came up many times
    assert store.tiers["device"] <= 64 * KIB


def test_clean_copies_are_the_first_to_go_under_host_pressure(stored: NewStore, gpu: SimGpu) -> None:
    store = stored(64 * KIB, 100 * KIB)  # 60 KiB for the host tier
    fill(store, gpu, "abcde")  # 60 KiB on the device, 40 on the host
    for key in "ab":  # they come up, and leave copies of 40 KiB; two others go down
        run_task(store, key)
        assert store.settle()
    assert 40 * KIB <= store.tiers["host"] < 42 * KIB  # and what is left of the values
    assert store.copy_bytes <= 20 * KIB  # beside 40 KiB that are nowhere else
    assert store.counters["host_to_disk"].nbytes == 0
    assert [float(store[k].get()[0]) for k in "abcde"] == [0, 1, 2, 3, 4]


def test_the_second_time_on_disk_is_not_written(stored: NewStore) -> None:
    store = stored(0, 100 * KIB)
    for i in range(6):
        store[i] = np.full(20 * KIB, i, np.uint8)
        assert store.settle()
    written = []
    for _ in range(3):
        for i in range(6):
            assert argument(store, i)[0] == i
            assert store.settle()
        written.append(store.counters["host_to_disk"].nbytes)
    assert written[1] == written[2]
    assert store.counters["disk_to_host"].number > 6


def test_what_user_code_holds_may_have_been_written_to(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(store, gpu, "abcdef")
    assert run_task(store, "a") == 0  # now with a copy below
    mine = store["a"]  # as get_worker().data["a"]
    mine[...] = 7.0
    fill(store, gpu, "ghij")
    assert store.tiers["host"] > 0
    assert set(store["a"].get()) == {7.0}
    for key in "ghij":
        del store[key]
    assert set(store["a"].get()) == {7.0}


def test_what_a_task_needs_goes_last(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(store, gpu, "abc")
    store.expect("task", ["a"], (0,), running=True)
    fill(store, gpu, "de")
    assert store.tiers["device"] == 60 * KIB
    before = gpu.h2d_copies
    assert run_task(store, "a") == 0
    assert gpu.h2d_copies == before  # it was still there, though the oldest
    store.expect_no_more("task")
    fill(store, gpu, "fgh")
    run_task(store, "a")
    assert gpu.h2d_copies > before


def test_inputs_of_the_next_task_come_up_when_there_is_room(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(store, gpu, "abcd")
    store.expect("later", ["a"], (5,), running=False)
    assert store.settle()
    assert store.counters["host_to_device"].number == 0  # no room: nothing goes down for it
    del store["b"], store["c"]
    assert store.settle()
    assert store.counters["host_to_device"].number == 1
    copies = gpu.h2d_copies
    assert run_task(store, "a") == 0
    assert gpu.h2d_copies == copies


def test_tasks_that_are_over_or_unknown_keys_need_nothing(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(store, gpu, "abcd")
    store.expect("t", ["nobody", "a"], (1,), running=False)
    store.expect("t", ["a"], (1,), running=True)  # the same task, now running
    store.expect_no_more("t")
    store.expect_no_more("t")
    del store["b"], store["c"]
    assert store.settle()
    assert store.counters["host_to_device"].number == 0
