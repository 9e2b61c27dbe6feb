"""What is only read is not copied twice, what tasks need next is up, and small values move in bundles."""

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from spill_stores import KIB, NewStore, SlowGpu, argument, put
from waiting import aside, scaled

from hpcgpu.errors import SpillError
from hpcgpu.sim import SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxies import is_proxy
from hpcgpu.spill.storage.disk import Disk

EACH = 800
VALUES: dict[str, Callable[[int], Any]] = {
    "arrays": lambda i: np.full(100, i),
    "views": lambda i: np.arange(300)[i : i + 100],
    "NumPy's numbers": lambda i: np.float64(i),
    "dicts": lambda i: {"sum": i / 2, "name": "x" * 100 + str(i), "sizes": (i, [i, None])},
    "strings": lambda i: f"{i:300}",
    "objects of other classes": lambda i: frozenset(["x" * 100 + str(i)]),
    "nothing": lambda _: None,
}


@pytest.fixture
def gpu() -> SlowGpu:
    return SlowGpu(64 * 1024 * KIB)


def array(gpu: SimGpu, number: float) -> SimArray:
    return gpu.adopt(np.full(EACH // 8, float(number)))


def number_of(x: Any) -> float:
    host = x.get()
    assert host.shape == (EACH // 8,) and (host == host[0]).all()
    return float(host[0])


@pytest.mark.parametrize(("host_bytes", "jit_unspill"), [(200_000, True), (0, True), (0, False), (200_000, False)])
def test_many_small_arrays_end_under_the_limits_and_come_back(
    stored: NewStore, gpu: SlowGpu, host_bytes: int, jit_unspill: bool
) -> None:
    number, limit = 4000, 200_000
    store = stored(limit, host_bytes, target=1.0, jit_unspill=jit_unspill)
    alone, lists = number // 2, range(number // 2, number, 10)
    for i in range(alone):
        store[i] = array(gpu, i)
    for i in lists:
        store["list", i] = [array(gpu, i + j) for j in range(10)]
    assert store.settle()
    there = store.tiers
    assert gpu.used_bytes == there["device"] <= limit
    assert bool(there["disk"]) is bool(host_bytes)
    assert host_bytes == 0 or there["host"] <= host_bytes
    counters = store.counters
    assert sum(counters[way].number for way in ("device_to_host", "host_to_disk")) < number // 8
    for i in range(alone):
        assert number_of(argument(store, i)) == i
    for i in lists:
        value = argument(store, ("list", i))
        assert [number_of(x) for x in value] == list(range(i, i + 10))
        assert all(is_proxy(x) is jit_unspill for x in value)
    assert store.settle()
    assert gpu.used_bytes <= limit


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_small_values_in_host_memory_go_to_disk(stored: NewStore, value: Any) -> None:
    store = stored(0, 2 * KIB, target=1.0)
    put(store, range(200), value)
    assert store.tiers["host"] <= 2 * KIB
    assert store.tiers["disk"]
    for i in range(200):
        assert type(store[i]) is type(value(i))
        assert str(store[i]) == str(value(i))
    for i in range(200):
        del store[i]
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}


class Labelled(np.float64):
    """A number with something in it that cannot be pickled."""

    lock: Any = None

    def __reduce__(self) -> Any:
        raise TypeError(self.lock)


def record() -> Any:
    return np.array([(threading.Lock(),)], dtype=[("a", object)])[0]


@pytest.mark.parametrize("make", [threading.Lock, record, Labelled])
def test_a_value_that_cannot_be_pickled_keeps_no_other_up(stored: NewStore, make: Callable[[], Any]) -> None:
    store = stored(0, 4 * KIB, target=1.0)
    for i in range(100):
        store[i] = "x" * 200 + str(i)
        if not i % 10:
            store["stays", i] = make()
    assert store.settle()
    stays = sum(u.nbytes for i in range(0, 100, 10) for u in store._entries["stays", i].units)
    assert store.tiers["host"] <= max(4 * KIB, stays + KIB)
    assert store.tiers["disk"] > 0
    assert [store[i][200:] for i in range(100)] == [str(i) for i in range(100)]


@pytest.mark.parametrize("limit", [1 << 30, 100 * KIB], ids=["on the device", "below"])
def test_a_key_that_goes_frees_its_part_of_a_bundle(stored: NewStore, gpu: SlowGpu, limit: int) -> None:
    store = stored(limit, 1 << 30)
    put(store, range(1000), lambda i: array(gpu, i))
    assert store.tiers["host"] == 0 or store.tiers["host"] >= 600 * EACH
    for i in range(1000):
        if i % 100:
            del store[i]
    assert sum(store.tiers.values()) == 10 * EACH
    assert gpu.used_bytes == store.tiers["device"]
    assert store.spilled_total.disk == store.tiers["host"]
    assert [number_of(store[i]) for i in range(0, 1000, 100)] == list(range(0, 1000, 100))


def test_on_disk_a_bundle_goes_with_its_last_key(stored: NewStore, gpu: SlowGpu) -> None:
    store = stored(60 * KIB, 40 * KIB, target=1.0)
    for i in range(64):
        store[i] = array(gpu, i)
    store["next"] = gpu.adopt(np.zeros(60 * KIB // 8))
    assert store.settle()
    assert store.tiers["disk"] == 52 * KIB  # in whole pages
    for i in range(63):
        del store[i]
    assert store.tiers["disk"] == 52 * KIB  # counted as long as it is there
    assert number_of(store[63]) == 63
    assert store.settle()
    del store[63]
    del store["next"]
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}
    assert gpu.used_bytes == 0


def test_names_of_one_small_array_are_one(stored: NewStore, gpu: SlowGpu) -> None:
    store = stored(100 * KIB)
    x = array(gpu, 7)
    store["a"], store["again"], store["view"], store["list"] = x, x, x[10:], [x]
    assert store.tiers["device"] == EACH
    del store["a"], x
    put(store, range(500), lambda i: array(gpu, i))
    assert gpu.used_bytes == store.tiers["device"] <= 100 * KIB
    again, view, (inner,) = (store[key] for key in ("again", "view", "list"))
    assert again is inner
    assert again[10:].get().tolist() == view.get().tolist() == [7.0] * 90
    assert np.shares_memory(again._host, view._host)


def test_an_array_is_there_as_long_as_its_proxy(stored: NewStore, gpu: SlowGpu) -> None:
    store = stored(100 * KIB, jit_unspill=True)
    for i in range(64):
        store[i] = [array(gpu, i)]
    held = [argument(store, i)[0] for i in (3, 5)]
    for i in range(64):
        del store[i]
    store["next"] = gpu.adopt(np.zeros(100 * KIB // 8))
    assert store.settle()
    assert store.tiers["host"] == 2 * EACH
    assert [number_of(x) for x in held] == [3, 5]
    del held
    store["more"] = 1  # what proxies have named is forgotten with the next event
    assert store.settle()
    del store["next"], store["more"]
    assert gpu.used_bytes == sum(store.tiers.values()) == 0


def test_the_length_of_a_small_array_on_disk_is_known_without_it(stored: NewStore, gpu: SlowGpu) -> None:
    store = stored(20 * KIB, 2 * KIB, target=1.0, jit_unspill=True)
    put(store, range(100), lambda i: [gpu.adopt(np.zeros(i + 1))])
    values, before = [argument(store, i)[0] for i in range(100)], gpu.h2d_copies
    assert store.tiers["disk"]
    assert [len(x) for x in values] == list(range(1, 101))
    assert gpu.h2d_copies == before


def test_keys_go_and_come_while_their_bundle_is_copied(stored: NewStore, gpu: SlowGpu) -> None:
    store = stored(100 * KIB)
    gpu.waits = True
    for i in range(200):
        store[i] = array(gpu, i)
    assert gpu.under_way.wait(scaled(20))
    for i in range(0, 200, 2):
        del store[i]
    for i in range(200, 260):
        store[i] = array(gpu, i)
    gpu.waits = False
    gpu.go_on.set()
    assert store.settle()
    left = [*range(1, 200, 2), *range(200, 260)]
    assert sum(store.tiers.values()) == len(left) * EACH
    assert gpu.used_bytes == store.tiers["device"] <= 100 * KIB
    assert [number_of(store[i]) for i in left] == left


def test_peer_gets_small_arrays_and_keeps_its_limits(stored: NewStore, gpu: SlowGpu) -> None:
    ours, theirs = stored(20 * KIB), stored(20 * KIB, 20 * KIB, target=1.0)
    put(ours, range(200), lambda i: array(gpu, i))
    for i in range(100):
        with ours.handing_out_handles():
            found = ours[i]
        theirs[i] = found.packed()
    assert theirs.settle()
    assert theirs.tiers["host"] <= 20 * KIB
    assert theirs.tiers["disk"] >= 60 * EACH
    assert theirs.counters["host_to_disk"].number < 20
    assert [number_of(theirs[i]) for i in range(100)] == list(range(100))


def test_unreadable_bundle_is_an_error_for_its_keys(stored: NewStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store, left = stored(0, 2 * KIB, target=1.0), list[SpillError]()
    store.on_fault = left.append
    put(store, range(200), lambda i: np.full(100, i))
    monkeypatch.setattr(Disk, "read", Mock(side_effect=OSError("no such file")))
    for key in (0, 1):
        with pytest.raises(SpillError, match=f"the value of .*\\b{key}\\b.* cannot be read back"):
            aside(lambda key=key: store[key]).result(scaled(20))
    assert len(left) == 1


# --- what tasks read, and need next


@pytest.fixture
def no_host(stored: NewStore) -> GpuSpillBuffer:
    return stored(64 * KIB, 0)


def wide(gpu: SimGpu, number: int, kib: int = 20) -> SimArray:
    return gpu.asarray(np.full(kib * KIB // 8, float(number)))


def fill(no_host: GpuSpillBuffer, gpu: SimGpu, keys: str) -> None:
    for i, key in enumerate(keys):
        no_host[key] = wide(gpu, i)
        assert no_host.settle()


def run_task(no_host: GpuSpillBuffer, key: str) -> float:
    return float(argument(no_host, key).sum().get())


def test_what_a_task_has_read_goes_down_again_without_a_copy(no_host: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(no_host, gpu, "abcdef")  # room for three
    for _ in range(5):
        for i, key in enumerate("abcdef"):
            assert run_task(no_host, key) == i * 20 * KIB / 8
            assert no_host.settle()
    each = 20 * KIB
    assert gpu.d2h_bytes <= 6 * each + 30 * 8  # each at most once, and the sums
    assert gpu.h2d_bytes >= 6 * each + 12 * each  # though they came up many times
    assert no_host.tiers["device"] <= 64 * KIB


def test_clean_copies_are_the_first_to_go_under_host_pressure(stored: NewStore, gpu: SimGpu) -> None:
    no_host = stored(64 * KIB, 100 * KIB)  # 60 KiB for the host tier
    fill(no_host, gpu, "abcde")  # 60 KiB on the device, 40 on the host
    for key in "ab":  # they come up, and leave copies of 40 KiB; two others go down
        run_task(no_host, key)
        assert no_host.settle()
    assert 40 * KIB <= no_host.tiers["host"] < 42 * KIB  # and what is left of the values
    assert no_host.copy_bytes <= 20 * KIB  # beside 40 KiB that are nowhere else
    assert no_host.counters["host_to_disk"].nbytes == 0
    assert [float(no_host[k].get()[0]) for k in "abcde"] == [0, 1, 2, 3, 4]


def test_the_second_time_on_disk_is_not_written(stored: NewStore) -> None:
    no_host = stored(0, 100 * KIB)
    for i in range(6):
        no_host[i] = np.full(20 * KIB, i, np.uint8)
        assert no_host.settle()
    written = []
    for _ in range(3):
        for i in range(6):
            assert argument(no_host, i)[0] == i
            assert no_host.settle()
        written.append(no_host.counters["host_to_disk"].nbytes)
    assert written[1] == written[2]
    assert no_host.counters["disk_to_host"].number > 6


def test_what_user_code_holds_may_have_been_written_to(no_host: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(no_host, gpu, "abcdef")
    assert run_task(no_host, "a") == 0  # now with a copy below
    mine = no_host["a"]  # as get_worker().data["a"]
    mine[...] = 7.0
    fill(no_host, gpu, "ghij")
    assert no_host.tiers["host"] > 0
    assert set(no_host["a"].get()) == {7.0}
    for key in "ghij":
        del no_host[key]
    assert set(no_host["a"].get()) == {7.0}


def test_what_a_task_needs_goes_last(no_host: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(no_host, gpu, "abc")
    no_host.expect("task", ["a"], (0,), running=True)
    fill(no_host, gpu, "de")
    assert no_host.tiers["device"] == 60 * KIB
    before = gpu.h2d_copies
    assert run_task(no_host, "a") == 0
    assert gpu.h2d_copies == before  # it was still there, though the oldest
    no_host.expect_no_more("task")
    fill(no_host, gpu, "fgh")
    run_task(no_host, "a")
    assert gpu.h2d_copies > before


def test_inputs_of_the_next_task_come_up_when_there_is_room(no_host: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(no_host, gpu, "abcd")
    no_host.expect("later", ["a"], (5,), running=False)
    assert no_host.settle()
    assert no_host.counters["host_to_device"].number == 0  # no room: nothing goes down for it
    del no_host["b"], no_host["c"]
    assert no_host.settle()
    assert no_host.counters["host_to_device"].number == 1
    copies = gpu.h2d_copies
    assert run_task(no_host, "a") == 0
    assert gpu.h2d_copies == copies


def test_tasks_that_are_over_or_unknown_keys_need_nothing(no_host: GpuSpillBuffer, gpu: SimGpu) -> None:
    fill(no_host, gpu, "abcd")
    no_host.expect("t", ["nobody", "a"], (1,), running=False)
    no_host.expect("t", ["a"], (1,), running=True)  # the same task, now running
    no_host.expect_no_more("t")
    no_host.expect_no_more("t")
    del no_host["b"], no_host["c"]
    assert no_host.settle()
    assert no_host.counters["host_to_device"].number == 0
