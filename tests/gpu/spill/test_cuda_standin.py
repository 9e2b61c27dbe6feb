"""What the store asks of the driver, on one that is as late as it may be (``support/fake_cuda.c``).

A real driver mostly comes in time, and shows no copy that is not waited for: these tests are of the stand-in alone.
``tests/unit/spill/devices/test_cuda_api.py`` runs them, and those of a real GPU which need no kernel.
"""

import contextlib
import functools
import gc
import itertools
import pickle
import queue
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import Standin
from spill_stores import NewStore
from waiting import scaled, until

from hpcgpu.errors import SpillError
from hpcgpu.host import host_memory
from hpcgpu.spill.devices import copies as copies_module
from hpcgpu.spill.devices import cuda
from hpcgpu.spill.devices.copies import PINNED_BYTES, DriverCopies, is_lasting
from hpcgpu.spill.devices.cuda import CudaDevice, device_of
from hpcgpu.spill.devices.pools import NoCopies
from hpcgpu.spill.storage.pinned import CHUNK_BYTES, is_pinned
from hpcgpu.spill.store.handles import Handle

MIB = 1 << 20
HELD = ("events", "streams", "pushed", "device")


@pytest.fixture
def driver() -> Standin:
    try:
        made = Standin()
    except (OSError, AttributeError):
        pytest.skip("of the stand-in for a driver alone (tests/unit/spill/devices/test_cuda_api.py runs them)")
    from cuda import core

    core.Device(0).set_current()
    CudaDevice.current(0)  # it has streams that stay
    return made


def held(driver: Standin, copies: DriverCopies) -> dict[str, int]:
    gc.collect()
    with copies.context():
        copies.call("cuCtxSynchronize")
    mine: Any = CudaDevice.current(0).copies
    kept = sum(len(each._events) + len(each._idle_stages) for each in (copies, mine))  # for the next copies
    return {what: driver.count(what) for what in HELD} | {"events": driver.count("events") - kept}


@pytest.fixture
def copies(driver: Standin) -> Iterator[DriverCopies]:
    made = DriverCopies(0)
    before = held(driver, made)
    yield made
    driver.mend()
    assert held(driver, made) == before
    until(lambda: [gc.collect(), made.trim()] and made.idle_bytes == 0, "all is given back", limit_s=30)


def empty(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


@pytest.fixture
def other(copies: DriverCopies) -> Iterator[object]:
    """A stream of a user, which no other one waits for."""
    with copies.context():
        stream = copies.call("cuStreamCreate", 1)
    yield stream
    copies.call("cuStreamDestroy", stream)


@pytest.mark.parametrize("nbytes", [4096, 9 * MIB])
def test_a_copy_waits_for_memory_of_another_stream(copies: DriverCopies, other: object, nbytes: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    with copies.context():
        pointer = int(copies.call("cuMemAllocAsync", nbytes, other))
    copies.to_device(source, pointer, int(other))  # type: ignore[call-overload]
    np.testing.assert_array_equal(copies.to_host(pointer, nbytes, empty), source)
    with copies.context():
        copies.call("cuMemFreeAsync", pointer, other)


def test_the_stand_in_tells_a_copy_that_does_not_wait(copies: DriverCopies, other: object) -> None:
    with copies.context():
        pointer = int(copies.call("cuMemAllocAsync", 4096, other))
    with pytest.raises(SpillError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        copies.to_device(np.zeros(4096, np.uint8), pointer, int(copies.up_stream))
    Standin().mend()
    with copies.context():
        copies.call("cuMemFreeAsync", pointer, other)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuEventRecord", "cuEventSynchronize"])
@pytest.mark.parametrize(("nbytes", "pinned"), [(4096, True), (9 * MIB, True), (9 * MIB, False)])
def test_a_copy_that_fails_leaves_nothing(
    driver: Standin, copies: DriverCopies, monkeypatch: pytest.MonkeyPatch, call: str, nbytes: int, pinned: bool
) -> None:
    if not pinned:
        copies._host.limit_bytes = 0
    monkeypatch.setattr(copies, "_has_context_events", False)  # so that the wait before the copy does not fail
    with copies.context():
        pointer = int(copies.call("cuMemAllocAsync", nbytes, copies.up_stream))
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"{call}=201")
    with pytest.raises(SpillError, match=f"{call} of the CUDA driver fails: CUDA_ERROR_INVALID_CONTEXT"):
        copies.to_host(pointer, nbytes, empty)
    assert driver.count("waiting") == 0  # nothing copies to memory that the next move gets
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    copies.to_device(np.full(nbytes, 7, np.uint8), pointer, int(copies.up_stream))
    assert copies.to_host(pointer, nbytes, empty).tobytes() == b"\7" * nbytes
    with copies.context():
        copies.call("cuMemFreeAsync", pointer, copies.up_stream)


@pytest.mark.parametrize("code", [2, 304, 801, 999])
def test_without_page_locked_memory_copies_go_through_ordinary(
    driver: Standin, copies: DriverCopies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    before, nbytes = driver.count("pinned"), 9 * MIB
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"cuMemHostRegister={code}")
    source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    with copies.context():
        pointer = int(copies.call("cuMemAllocAsync", nbytes, copies.up_stream))
    copies.to_device(source, pointer, int(copies.up_stream))
    np.testing.assert_array_equal(copies.to_host(pointer, nbytes, empty), source)
    assert driver.count("pinned") == before
    (warning,) = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith("the GPU's driver locks no pages: cuMemHostRegister")
    with copies.context():
        copies.call("cuMemFreeAsync", pointer, copies.up_stream)


def test_page_locked_memory_is_given_back(driver: Standin, copies: DriverCopies) -> None:
    before, nbytes = driver.count("pinned"), 4 * MIB
    with copies.context():
        pointer = int(copies.call("cuMemAllocAsync", nbytes, copies.up_stream))
    down = copies.to_host(pointer, nbytes, empty)
    assert driver.count("pinned") == before + CHUNK_BYTES
    assert copies.trim() == 0  # an array is in it
    del down
    assert copies.idle_bytes == copies.trim() == CHUNK_BYTES
    gc.collect()
    assert driver.count("pinned") == before
    with copies.context():
        copies.call("cuMemFreeAsync", pointer, copies.up_stream)


@pytest.fixture
def memory(copies: DriverCopies) -> Iterator[int]:
    """The address of 160 MiB of the device."""
    with copies.context():
        pointer = int(copies.call("cuMemAlloc", 160 * MIB))
    yield pointer
    with copies.context():
        copies.call("cuMemFree", pointer)


def test_little_host_memory_locks_no_page(
    driver: Standin,
    copies: DriverCopies,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cgroup at its limit: the kernel would end a process for the pages."""
    monkeypatch.setattr(host_memory, "memory_left", lambda: 0.05)
    source = np.random.default_rng(1).integers(0, 256, 9 * MIB, np.uint8)
    before = driver.count("locks")
    copies.to_device(source, memory, int(copies.up_stream))
    np.testing.assert_array_equal(copies.to_host(memory, 9 * MIB, empty), source)
    assert (driver.count("locks"), caplog.records) == (before, [])


@pytest.mark.parametrize(("nbytes", "pinned"), [(64 << 10, True), (9 * MIB, True), (9 * MIB, False)])
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_gpu_lost_in_any_call_of_a_copy_is_reported(
    driver: Standin,
    copies: DriverCopies,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    nbytes: int,
    pinned: bool,
) -> None:
    """Whichever call of the driver is the first to fail."""
    monkeypatch.setattr(copies_module, "_POLL_S", -1.0)  # it sleeps until an event at once: so all calls are made
    copies._host.limit_bytes *= pinned
    copies.to_device(np.full(nbytes, 7, np.uint8), memory, int(copies.up_stream))
    root = copies.to_host(memory, nbytes, empty)
    step = {
        "down": lambda: copies.to_host(memory, nbytes, empty),
        "up": lambda: copies.to_device(root, memory, 0),
    }[way]
    for calls in itertools.count():
        if way == "down":
            copies.trim()  # so memory is locked in the step, too
        driver.lose_after(719, calls)
        try:
            step()
            break
        except SpillError as e:
            assert is_lasting(e)
        driver.mend()
        copies.synchronize()  # what a GPU that is lost for good does not do any more
        np.testing.assert_array_equal(copies.to_host(memory, nbytes, empty), root)
    assert driver.count("lost") == 0
    driver.mend()  # it is to be lost in a later call
    assert calls >= 4


def test_mixed_sizes_are_carved_from_few_chunks(driver: Standin, copies: DriverCopies, memory: int) -> None:
    """As when a store moves arrays of 1 to 8 MiB up and down: each size had pages of its own, 102 allocations."""
    random = np.random.default_rng(0)
    copies._host.limit_bytes = 64 * MIB
    roots = [copies.to_host(memory, MIB, empty)]
    copies.to_device(np.zeros(MIB, np.uint8), memory, int(copies.up_stream))  # with a stage
    before, untouched, pinned = driver.count("locks"), driver.count("untouched"), 0
    for _ in range(200):
        if sum(root.nbytes for root in roots) > 40 * MIB:
            del roots[random.integers(len(roots))]
        roots.append(copies.to_host(memory, int(random.integers(MIB, 8 * MIB)), empty))
        pinned += is_pinned(roots[-1])
    assert driver.count("locks") - before <= 20
    assert pinned > 180
    # no other call of the driver is answered while pages are locked: they are there before, and few at a time
    assert (driver.count("untouched") - untouched, driver.count("largest") <= CHUNK_BYTES) == (0, True)


@pytest.mark.usefixtures("driver")
def test_large_arrays_span_chunks_and_come_back_whole(copies: DriverCopies, memory: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, 150 * MIB, np.uint8)
    copies.to_device(source, memory, int(copies.up_stream))
    first = copies.to_host(memory, MIB, empty)  # so it begins within a chunk
    down = copies.to_host(memory, 150 * MIB, empty)
    assert is_pinned(down) and len(copies._host.parts(down)) == 3
    np.testing.assert_array_equal(down, source)
    copies.to_device(down[::-1].copy(), memory, int(copies.up_stream))
    copies.to_device(down, memory, int(copies.up_stream))
    np.testing.assert_array_equal(copies.to_host(memory, 150 * MIB, empty), source)
    del first


@pytest.mark.parametrize("nbytes", [4096, 9 * MIB])
def test_grace_copies_from_and_to_ordinary_memory(
    driver: Standin, memory: int, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Where the GPU reads the host's page tables no page is locked, and no copy is staged."""
    monkeypatch.setenv("FAKE_CUDA_PAGE_TABLES", "1")
    grace = DriverCopies(0)
    grace.lock_at_most(64 * MIB)
    before, source = driver.count("locks"), np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    grace.to_device(source, memory, int(grace.up_stream))
    root = empty(nbytes)
    assert grace.to_host(memory, nbytes, lambda _: root) is root
    np.testing.assert_array_equal(root, source)
    assert not grace.lock_ahead()
    assert (driver.count("locks"), grace.idle_bytes) == (before, 0)
    for made in (grace._down, grace.up_stream):
        grace.call("cuStreamDestroy", made)
    for event in grace._events:
        grace.call("cuEventDestroy", event)


@pytest.mark.parametrize(("nbytes", "expected"), [(64 << 10, (6, 4)), (4 * MIB, (6, 6)), (128 * MIB, (7, 7))])
def test_a_copy_takes_few_calls_of_the_driver(
    driver: Standin,
    copies: DriverCopies,
    memory: int,
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int,
    expected: tuple[int, int],
) -> None:
    """Down and up, where CUDA is done when it is asked first; there were 13 and 12."""
    monkeypatch.setenv("FAKE_CUDA_PROMPT", "1")

    def calls(copy: Callable[[], object]) -> int:
        copy()
        before = driver.count("calls")
        copy()
        return driver.count("calls") - before

    root = copies.to_host(memory, nbytes, empty)
    down = calls(lambda: copies.to_host(memory, nbytes, empty))
    assert (down, calls(lambda: copies.to_device(root, memory, 0))) == expected


@pytest.fixture
def device(driver: Standin) -> Any:
    from cuda import core

    del driver
    return core.Device(0)


def fill(store: Any, device: Any, count: int) -> None:
    """Let a store have buffers of 1 MiB, and move what does not fit."""
    stream = device.create_stream()
    for i in range(count):
        store[i] = buffer = device.allocate(MIB, stream=stream)
        buffer.fill(i + 1, stream=stream)
    del buffer
    assert store.settle(scaled(60))


def test_memory_is_freed_when_other_streams_are_done(device: Any, copies: DriverCopies, other: object) -> None:
    buffer = device.allocate(MIB, stream=device.create_stream())
    cuda = device_of(buffer)
    assert isinstance(cuda, CudaDevice)
    (up,) = cuda.unpack(*cuda.pack([[buffer]], empty)[0])
    buffer.close()
    mine = cuda.copies
    assert isinstance(mine, DriverCopies)
    with copies.context():
        copies.call("cuMemsetD8Async", int(up.handle), 3, MIB, other)
        del up
        gc.collect()
        copies.call("cuStreamSynchronize", mine.up_stream)
        copies.call("cuCtxSynchronize")  # an illegal address, if it was freed before


def test_an_upload_that_finds_no_memory_makes_room(
    device: Any, driver: Standin, copies: DriverCopies, new_store: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = device.create_stream()
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(held(driver, copies)["device"] + 10 * MIB))
    store = new_store(6 * MIB, None)
    for i in range(2):
        store[i] = buffer = device.allocate(4 * MIB, stream=stream)
        buffer.fill(i + 1, stream=stream)
        cuda = device_of(buffer)
        assert cuda is not None
        del buffer
        assert store.settle(scaled(60))
    users = device.allocate(4 * MIB, stream=stream)  # 2 MiB are left, and one buffer of 4 can go down
    for i in (0, 1, 0):
        assert set(cuda.pack([[store[i]]], empty)[0][0].tolist()) == {i + 1}
    users.close(stream)


def test_a_store_locks_no_more_pages_than_its_host_tier_has(
    device: Any, driver: Standin, copies: DriverCopies, new_store: NewStore
) -> None:
    mine = CudaDevice.current(0).copies
    assert isinstance(mine, DriverCopies)
    mine.trim()
    before, store = driver.count("pinned"), new_store(2 * MIB, 10 * MIB)  # 6 MiB: Dask's target
    fill(store, device, 12)
    stages = mine._stages._held_bytes
    assert driver.count("pinned") - before <= 3 * MIB + stages  # half of them
    cuda = CudaDevice.current(0)
    assert [cuda.pack([[store[i]]], empty)[0][0][3] for i in range(12)] == list(range(1, 13))
    mine._host.limit_bytes, mine._tier_bytes = PINNED_BYTES, None


def test_memory_is_locked_before_the_device_is_full(
    device: Any, driver: Standin, copies: DriverCopies, new_store: NewStore
) -> None:
    mine = CudaDevice.current(0).copies
    assert isinstance(mine, DriverCopies)
    mine._host.limit_bytes, mine._tier_bytes = 0, None
    mine.trim()
    before, store = driver.count("locks"), new_store(16 * MIB, 10 * CHUNK_BYTES)
    fill(store, device, 7)
    assert driver.count("locks") == before
    fill(store, device, 10)
    until(lambda: driver.count("locks") == before + 1, "a chunk is locked", limit_s=30)
    assert store.counters["device_to_host"].number == 0
    store.trim()
    assert (store.settle(scaled(60)), mine.idle_bytes) == (True, 0)  # and stays given back until something moves
    fill(store, device, 20)
    until(lambda: mine._host.free_bytes, "memory is locked for the next moves", limit_s=30)
    full = new_store(16 * MIB, CHUNK_BYTES)  # a host tier that has no room for a chunk beside data
    mine.trim()
    locked = driver.count("locks")
    fill(full, device, 10)
    assert driver.count("locks") == locked
    mine._host.limit_bytes, mine._tier_bytes = PINNED_BYTES, None


@pytest.mark.parametrize("nbytes", [64 << 10, MIB])
@pytest.mark.parametrize("way", ["down", "up"])
def test_a_gpu_lost_in_any_call_leaves_host_and_disk_right(
    device: Any, driver: Standin, new_store: NewStore, monkeypatch: pytest.MonkeyPatch, way: str, nbytes: int
) -> None:
    """A move down, or an allocation with a move up: the owner is told once, and what is below can be read."""
    monkeypatch.setenv("FAKE_CUDA_PROMPT", "1")
    mine, stream = CudaDevice.current(0).copies, device.create_stream()
    assert isinstance(mine, DriverCopies)
    for calls in itertools.count():
        mine._host.limit_bytes, mine._tier_bytes = PINNED_BYTES, None
        mine.trim()
        faults, store = queue.SimpleQueue[SpillError](), new_store(2 * nbytes, int(3.4 * nbytes))  # for the host 2
        store.on_fault = faults.put
        buffers = [device.allocate(nbytes, stream=stream) for _ in range(7)]  # a lost GPU frees none
        for i in range(6):
            buffers[i].fill(i + 1, stream=stream)
            store[i] = buffers[i]
        assert store.settle(scaled(60))
        assert store.tiers == dict.fromkeys(("device", "host", "disk"), 2 * nbytes)
        driver.lose_after(719, calls)
        with contextlib.suppress(SpillError):
            if way == "down":
                store[6] = buffers[6]
            else:
                store[3]
        until(lambda s=store, f=faults: not f.empty() or s.settle(0.1), "it has moved, or the GPU is lost", limit_s=30)
        if not driver.count("lost"):
            break
        assert "cannot be used any more by this process: " in str(faults.get(timeout=scaled(30)))
        with store.handing_out_handles():
            below = {i: each for i in store if isinstance(each := store[i], Handle)}
        assert len(below) >= 4 - (way == "up")
        for i, handle in below.items():
            assert bytes([i + 1]) * nbytes in pickle.dumps(handle.packed())
        assert faults.empty()
        driver.mend()
        store.close()
    driver.mend()
    mine._host.limit_bytes, mine._tier_bytes = PINNED_BYTES, None
    assert calls >= 6


def test_a_gpu_without_memory_pools_is_spilled_to_and_from(
    device: Any, driver: Standin, copies: DriverCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = device.create_stream()
    buffer = device.allocate(MIB, stream=stream)
    buffer.fill(5, stream=stream)
    monkeypatch.setenv("FAKE_CUDA_NO_POOLS", "1")  # a vGPU without unified memory
    plain = CudaDevice(0, DriverCopies(0))
    ((root, views),) = plain.pack([[buffer]], empty)
    (up,) = plain.unpack(root, views)
    assert set(plain.pack([[up]], empty)[0][0].tolist()) == {5}
    assert plain.used_bytes == 0
    monkeypatch.delenv("FAKE_CUDA_NO_POOLS")
    buffer.close(stream)
    del up
    with copies.context():
        for made in (plain.copies._down, plain.copies.up_stream):
            copies.call("cuStreamDestroy", made)
        plain.copies.trim()
        for event in plain.copies._events:
            copies.call("cuEventDestroy", event)
    del plain


def test_a_gpu_that_was_in_use_is_asked_for_again(
    device: Any, new_store: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_made", functools.cache(cuda._made.__wrapped__))
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain=46")  # the context of a killed worker goes
    assert isinstance(CudaDevice.current(0).copies, NoCopies)
    monkeypatch.delenv("FAKE_CUDA_FAIL")
    until(lambda: isinstance(CudaDevice.current(0).copies, DriverCopies), "copies are there", limit_s=30)
    store = new_store(2 * MIB, None)
    fill(store, device, 4)
    assert store.tiers == {"device": 2 * MIB, "host": 2 * MIB, "disk": 0}


def test_small_buffers_go_down_after_one_wait_for_the_device(
    device: Any, copies: DriverCopies, new_store: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, waits, call = device.create_stream(), Counter[str](), DriverCopies.call

    def counted(self: DriverCopies, name: str, *arguments: object) -> Any:
        waits[name] += 1
        return call(self, name, *arguments)

    store = new_store(64 * 800, None)
    for i in range(64):
        store[i] = buffer = device.allocate(800, stream=stream)
        buffer.fill(i + 1, stream=stream)
    monkeypatch.setattr(DriverCopies, "call", counted)
    store["next"] = device.allocate(64 * 800, stream=stream)
    del buffer
    assert store.settle(scaled(60))
    assert (store.tiers["host"], waits["cuCtxRecordEvent"]) == (64 * 800, 1)
    assert (waits["cuMemcpyDtoHAsync"], waits["cuEventSynchronize"]) == (64, 1)
    assert waits["cuEventCreate"] <= 2
    cuda = device_of(store[0])
    assert cuda is not None
    for i in range(64):
        assert cuda.pack([[store[i]]], empty)[0][0].tobytes() == bytes([i + 1]) * 800
