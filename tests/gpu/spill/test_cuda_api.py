"""Buffers of cuda.core and arrays of CuPy on a GPU."""

import asyncio
import gc
import importlib
from typing import Any

import numpy as np
import pytest
from spill_stores import NewStore, put
from waiting import scaled

from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.copies import DriverCopies
from hpcgpu.spill.devices.cuda import device_of, is_device_array
from hpcgpu.spill.storage.pinned import is_pinned

MIB = 1 << 20


@pytest.fixture
def core() -> Any:
    module = pytest.importorskip("cuda.core", reason="no cuda.core here")
    try:
        module.Device(0).set_current()
    except Exception as why:  # what the loader of the driver raises is of no public class
        pytest.skip(f"no GPU here: {why}")
    return module


@pytest.fixture
def store(new_store: NewStore) -> GpuSpillBuffer:
    return new_store(8 * MIB, 24 * MIB)


def host_bytes(core: Any, buffer: Any) -> np.ndarray:
    stream = core.Device(0).create_stream()
    pinned = core.LegacyPinnedMemoryResource().allocate(buffer.size)
    buffer.copy_to(pinned, stream=stream)
    stream.sync()
    return np.from_dlpack(pinned).view(np.uint8).copy()


def used(cuda: Any) -> int:
    """What is used when the device has done all that it was given: the runtime's Device.sync has no stand-in."""
    gc.collect()
    with cuda.copies.context():
        cuda.copies.call("cuCtxSynchronize")
    return int(cuda.used_bytes)


def test_buffers_go_through_every_tier(core: Any, store: GpuSpillBuffer) -> None:
    device = core.Device(0)
    stream = device.create_stream()
    for i in range(40):
        buffer = device.allocate(2 * MIB, stream=stream)
        buffer.fill(i, stream=stream)  # not waited for: the store does
        store[i] = [buffer]
    del buffer
    assert store.settle(scaled(60))
    assert 0 < store.tiers["device"] <= 8 * MIB
    assert store.tiers["disk"] > 0
    for i in range(40):
        (back,) = store[i]
        assert type(back) is core.Buffer
        assert back.size == 2 * MIB
        np.testing.assert_array_equal(host_bytes(core, back), np.full(2 * MIB, i, np.uint8))


def test_memory_that_goes_on_an_event_loop_is_freed_by_a_thread(
    core: Any, store: GpuSpillBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free it waits for the device, and a kernel may take minutes."""
    on_loop, call = [], DriverCopies.call

    def noting(copies: DriverCopies, name: str, *arguments: object) -> Any:
        if asyncio._get_running_loop() is not None:
            on_loop.append(name)
        return call(copies, name, *arguments)

    device = core.Device(0)
    stream = device.create_stream()
    first = device.allocate(MIB, stream=stream)
    cuda = device_of(first)
    assert cuda is not None
    assert cuda.buffer_of(first)[1] == MIB
    before = used(cuda)
    put(store, range(30), lambda i: device.allocate(MIB, stream=stream))
    for i in range(30):
        assert store[i].size == MIB
    assert store.settle(scaled(60))
    monkeypatch.setattr(DriverCopies, "call", noting)

    async def forget_all() -> None:
        store.clear()

    asyncio.run(forget_all())
    assert on_loop == []
    assert store.settle(scaled(60))
    assert used(cuda) == before


def test_host_buffers_are_left_alone(core: Any) -> None:
    assert not is_device_array(core.LegacyPinnedMemoryResource().allocate(MIB))


@pytest.mark.parametrize("nbytes", [1, 4096, MIB, 8 * MIB, 8 * MIB + 1, 40 * MIB + 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_copies_of_every_size(core: Any, nbytes: int, pinned: bool) -> None:
    copies = importlib.import_module("hpcgpu.spill.devices.copies").DriverCopies(0)
    if not pinned:
        copies._host.limit_bytes = 0
    expected = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    stream = core.Device(0).create_stream()
    buffer = core.Device(0).allocate(nbytes, stream=stream)
    copies.to_device(expected, int(buffer.handle), int(stream.handle))
    down = copies.to_host(int(buffer.handle), nbytes, lambda n: np.empty(n, np.uint8))
    assert is_pinned(down) == (pinned and nbytes >= MIB)
    np.testing.assert_array_equal(down, expected)
    copies.to_device(down, int(buffer.handle), int(stream.handle))
    np.testing.assert_array_equal(host_bytes(core, buffer), expected)
