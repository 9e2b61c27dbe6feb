"""Others who need memory of the GPU get it: CuPy's pool leaves some, and libraries give back what they only keep."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import cupy_arrays
import fake_cuda
import numpy as np
import pytest
from cupy_arrays import filled, on_host
from spill_stores import NewStore, put
from waiting import scaled, until

from hpcgpu.deploy.processes.rmm import evicting
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.pools import evict_on_failure

MIB = 1 << 20
Room = Callable[[int], None]


@pytest.fixture
def room(driver: fake_cuda.Standin, monkeypatch: pytest.MonkeyPatch) -> Room:
    """Give the device so much memory beside what it has allocated."""
    CudaDevice.current(0)
    return lambda nbytes: monkeypatch.setenv("FAKE_CUDA_BYTES", str(driver.count("device") + nbytes))


@pytest.fixture
def rmm_resource() -> Iterator[Any]:
    """RMM's own adaptor as a worker has it, over the driver's allocations."""
    import rmm

    copies: Any = CudaDevice.current(0).copies
    held: list[int] = []

    def allocate(nbytes: int, stream: object) -> int:
        with copies.context():
            held.append(int(copies.call("cuMemAlloc", nbytes)))
            return held[-1]

    def free(pointer: int, nbytes: int, stream: object) -> None:
        held.remove(pointer)
        with copies.context():
            copies.call("cuMemFree", pointer)

    yield evicting(rmm.mr.CallbackMemoryResource(allocate, free))
    for pointer in tuple(held):
        free(pointer, 0, None)


def stored(store: GpuSpillBuffer, count: int) -> None:
    for i in range(count):
        store[i] = filled(4 * MIB, i)


def test_rmm_gets_the_memory_that_left_cupys_pool(new_store: NewStore, room: Room, rmm_resource: Any) -> None:
    room(64 * MIB)
    store = new_store(1.0)
    stored(store, 15)
    assert rmm_resource.allocate(20 * MIB)
    assert 24 * MIB <= store.tiers["device"] <= 40 * MIB  # no more left than had to
    assert store.rescues == 1
    assert [int(on_host(store[i])[-1]) for i in range(15)] == list(range(15))


def test_rmm_gets_blocks_that_cupys_pool_only_keeps(new_store: NewStore, room: Room, rmm_resource: Any) -> None:
    room(64 * MIB)
    store = new_store(1.0)
    stored(store, 1)
    kept = [filled(4 * MIB, i) for i in range(13)]
    kept.clear()
    gc.collect()
    assert rmm_resource.allocate(40 * MIB)
    assert store.tiers["device"] == 4 * MIB  # what was kept is enough
    with pytest.raises(MemoryError):
        rmm_resource.allocate(80 * MIB)  # more than there is: an end
    assert store.tiers["device"] == 0


def test_numba_gives_back_arrays_that_it_has_only_put_off() -> None:
    from numba import cuda

    driver = fake_cuda.Standin()
    device = CudaDevice.current(0)
    device.kind("numba")
    before = driver.count("device")
    arrays = [cuda.to_device(np.zeros(MIB, "u1")) for _ in range(9)]  # it frees ten at once
    del arrays
    gc.collect()
    assert driver.count("device") == before + 9 * MIB
    assert device.give_back()
    assert driver.count("device") == before
    assert not device.give_back()


def test_an_allocator_that_a_task_sets_later_makes_room_too(new_store: NewStore, room: Room) -> None:
    import cupy

    before = cupy.cuda.get_allocator()
    try:
        store = new_store(1.0)
        stored(store, 1)
        room(48 * MIB)
        pool = cupy.cuda.MemoryPool()
        cupy.cuda.set_allocator(pool.malloc)
        for i in range(1, 30):
            store[i] = filled(4 * MIB, i)  # 120 MiB of 48
        assert store.rescues > 0
        assert pool.used_bytes() > 0  # the task's own pool is still the one
        assert [int(on_host(store[i])[-1]) for i in range(30)] == list(range(30))
        store.clear()
        pool.free_all_blocks()
    finally:
        cupy.cuda.set_allocator(before)


def test_cupy_makes_room_before_an_array_of_it_is_stored(new_store: NewStore, room: Room) -> None:
    import cupy
    from numba import cuda

    before, pool = cupy.cuda.get_allocator(), cupy.cuda.MemoryPool()
    store = new_store(1.0)
    room(64 * MIB)
    try:
        cupy.cuda.set_allocator(pool.malloc)
        evict_on_failure()  # a worker calls it when CuPy has been imported
        for i in range(15):
            store[i] = cuda.to_device(np.full(4 * MIB, i, "u1"))
        assert filled(20 * MIB, 7).nbytes == 20 * MIB
        assert store.rescues > 0
        assert [int(store[i].copy_to_host()[-1]) for i in range(15)] == list(range(15))
        store.clear()
        pool.free_all_blocks()
        CudaDevice.current(0).give_back()  # of numba's queue
    finally:
        cupy.cuda.set_allocator(before)


def test_cudf_that_spills_itself_is_called_by_our_callback(
    rmm_resource: Any, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDF's own options and manager: it refuses to put a callback beside ours."""
    import rmm

    cudf = cupy_arrays.package(monkeypatch)
    resource = evicting(rmm_resource)
    monkeypatch.setattr(rmm.mr, "get_current_device_resource", lambda: resource)
    cudf.set_option("spill", True)  # as user code may, long after its import
    manager = cudf.core.buffer.spill_manager.get_global_manager()
    mine = [resource.allocate(4 * MIB)]
    room(2 * MIB)
    asked: list[int] = []

    def spill_device_memory(nbytes: int) -> int:
        asked.append(nbytes)
        if not mine:
            return 0
        resource.deallocate(mine.pop(), 4 * MIB)
        return 4 * MIB

    monkeypatch.setattr(manager, "spill_device_memory", spill_device_memory)
    assert resource.allocate(5 * MIB)
    assert asked == [5 * MIB]
    with pytest.raises(MemoryError):
        resource.allocate(5 * MIB)


@pytest.fixture
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
    put(store, range(24), lambda i: filled(MIB, i))
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


def test_a_pool_is_emptied_when_no_kernel_is_waited_for(
    new_store: NewStore, pool: Any, driver: fake_cuda.Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It frees under a lock: a thread that allocates meanwhile would wait for the kernels."""
    import cupy

    pool.free_all_blocks()
    waiting: list[int] = []

    class Watched:
        def free_all_blocks(self) -> None:
            waiting.append(driver.count("waiting"))
            pool.free_all_blocks()

        def __getattr__(self, name: str) -> Any:
            return getattr(pool, name)

    new_store(1.0)["a"] = kept = filled(MIB, 1)
    monkeypatch.setattr(cupy, "get_default_memory_pool", Watched)
    assert not CudaDevice.current(0).give_back() and waiting == []  # nothing is free, so nothing waits
    freed = filled(4 * MIB, 1)
    del freed
    with cupy.cuda.Stream(non_blocking=True):
        kept.data.memset_async(7, MIB)
    assert driver.count("waiting") > 0
    assert CudaDevice.current(0).give_back()
    assert waiting == [0]


def test_blocks_of_a_users_pool_are_given_back(new_store: NewStore, pool: Any) -> None:
    import cupy

    users = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(users.malloc)
    try:
        new_store(1.0)["a"] = filled(MIB, 1)
        freed = filled(32 * MIB, 1)
        del freed
        assert users.free_bytes() == 32 * MIB
        assert CudaDevice.current(0).give_back()
        assert users.free_bytes() == 0
    finally:
        cupy.cuda.set_allocator(pool.malloc)
