"""What several tests of the spill store share: sizes, slow and faulty devices, and reads as tasks do them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import scaled

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer

KIB = 1024
NewStore = Callable[..., GpuSpillBuffer]


@pytest.fixture
def new_store(tmp_path: Path) -> Iterator[NewStore]:
    """Make stores, which are closed at the end; then none of their files is left."""
    made: list[GpuSpillBuffer] = []

    def new(*arguments: Any, **keywords: Any) -> GpuSpillBuffer:
        made.append(GpuSpillBuffer(*arguments, local_directory=str(tmp_path), **keywords))
        return made[-1]

    yield new
    for store in made:
        store.close()
    assert list(tmp_path.iterdir()) == []


class SlowGpu(SimGpu):
    """A device whose copies to the host wait for ``go_on``, if ``waits``."""

    waits = False

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(memory_bytes)
        self.under_way, self.go_on = threading.Event(), threading.Event()

    def pack(self, arrays: Any, *more: Any) -> Any:
        if self.waits:
            self.under_way.set()
            assert self.go_on.wait(30)
        return super().pack(arrays, *more)


class FaultyGpu(SlowGpu):
    """A device whose copies to the host raise ``down``, and those from it ``up``."""

    down: BaseException | None = None
    up: BaseException | None = None

    def pack(self, *arguments: Any) -> Any:
        if self.down is not None:
            raise self.down
        return super().pack(*arguments)

    def unpack(self, *arguments: Any) -> Any:
        if self.up is not None:
            raise self.up
        return super().unpack(*arguments)


class Odd:
    """A value of this size, which is pickled as a function says."""

    def __init__(self, nbytes: int, reduce: Callable[[], Any]) -> None:
        self.nbytes, self.reduce = nbytes, reduce

    def __sizeof__(self) -> int:
        return self.nbytes

    def __reduce__(self) -> Any:
        return self.reduce()


def put(store: GpuSpillBuffer, keys: Iterable[Any], make: Callable[[Any], Any]) -> None:
    """Set each key to what is made of it, and wait until all that is above a limit has gone down."""
    for key in keys:
        store[key] = make(key)
    assert store.settle(scaled(60))


def fill(store: GpuSpillBuffer, gpu: SimGpu, count: int = 40) -> None:
    """Set ``count`` keys of 8 KiB each on the device, of which each byte is the key."""
    for i in range(count):
        store[i] = gpu.asarray(np.full(8 << 10, i, "u1"))


def filled(store: GpuSpillBuffer, gpu: SimGpu, count: int = 40) -> None:
    """Set these keys, and wait until all that is above a limit has gone down."""
    fill(store, gpu, count)
    assert store.settle(scaled(20))


def assert_moves(store: GpuSpillBuffer, gpu: SimGpu) -> None:
    """Let the store, of 64 KiB of a device, move what it is given, and read it back."""
    filled(store, gpu)
    assert store.tiers["device"] <= 64 * KIB
    assert [store[i].get()[0] for i in range(40)] == list(range(40))


def to_disk(store: GpuSpillBuffer) -> None:
    """Have all that a store holds in host memory go to disk, as far as it goes."""
    before = None
    while store.tiers["host"] != before:
        before = store.tiers["host"]
        store.evict()
        assert store.settle(scaled(10))
    assert store.tiers["disk"] > 0


def argument(store: GpuSpillBuffer, key: Any) -> Any:
    """Read a key as the argument of a task."""
    with store.handing_out_handles():
        value = store[key]
    with store.using([key]):
        return value.resolve() if hasattr(value, "resolve") else value
