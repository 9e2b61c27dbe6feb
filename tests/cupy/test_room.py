"""Who else needs memory of the GPU gets it: CuPy's pool leaves some, and gives back what nobody uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cupy_arrays import filled, on_host
from spill_stores import NewStore
from waiting import scaled, until

from hpcgpu.spill.devices.cuda import CudaDevice

MIB = 1 << 20


@pytest.fixture(autouse=True)
def pool() -> Iterator[Any]:
    """CuPy's pool without a limit, as each process has it at first."""
    import cupy

    made = cupy.get_default_memory_pool()
    made.set_limit(0)
    cupy.cuda.set_allocator(made.malloc)
    CudaDevice.current(0).kinds.clear()
    yield made
    made.set_limit(0)


def take(nbytes: int) -> None:
    """Allocate as cuBLAS, NCCL and UCX do: by the driver, and nobody makes room."""
    copies = CudaDevice.current(0).copies
    with copies.context():
        copies.call("cuMemFree", int(copies.call("cuMemAlloc", nbytes)))


def test_cupys_pool_leaves_room_for_libraries(
    new_store: NewStore, pool: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_bytes = CudaDevice.current(0).memory_bytes
    store = new_store(1.0)
    for i in range(device_bytes // (8 * MIB) + 4):
        store[i] = filled(8 * MIB, i)
    assert store.counters["device_to_host"].number >= 4
    take(device_bytes // 10)
    assert int(on_host(store[0])[5]) == 0


def test_a_limit_of_the_user_is_kept(new_store: NewStore, pool: Any) -> None:
    pool.set_limit(77 * MIB)
    new_store(MIB)["a"] = filled(MIB, 1)
    assert pool.get_limit() == 77 * MIB


def test_spilled_memory_goes_back_to_the_driver(new_store: NewStore, pool: Any) -> None:
    store = new_store(4 * MIB)
    for i in range(24):
        store[i] = filled(MIB, i)
    assert store.settle(scaled(30))
    until(lambda: pool.total_bytes() <= 4 * MIB, "CuPy's pool gives back what it does not use", limit_s=30)


def test_memory_goes_back_at_once_where_little_is_left(
    new_store: NewStore, pool: Any, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(4 * MIB)
    store["first"] = filled(MIB, 0)  # the pool has its limit
    assert store.settle(scaled(30))
    more = [filled(MIB, i) for i in range(24)]
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(driver.count("device") + MIB))
    for i, x in enumerate(more):
        store[i] = x
    more.clear()
    del x
    assert store.settle(scaled(30))
    assert pool.total_bytes() <= 6 * MIB


def test_trim_gives_cupys_free_memory_back(new_store: NewStore, pool: Any) -> None:
    store = new_store(None)
    store["a"] = filled(MIB, 1)
    held = filled(40 * MIB, 1)
    del held
    assert pool.free_bytes() >= 40 * MIB
    store.trim()
    assert pool.free_bytes() == 0
