"""What several tests of the spill store share: sizes, a slow device, and reads as tasks do them."""

from __future__ import annotations

import threading
from typing import Any

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer

KIB = 1024


class SlowGpu(SimGpu):
    """A device whose copies to the host wait, if they are told to."""

    waits = False

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(memory_bytes)
        self.under_way, self.go_on = threading.Event(), threading.Event()

    def pack(self, arrays: Any, *more: Any) -> Any:
        if self.waits:
            self.under_way.set()
            assert self.go_on.wait(30)
        return super().pack(arrays, *more)


def argument(store: GpuSpillBuffer, key: Any) -> Any:
    """A key as the argument of a task."""
    with store.handing_out_handles():
        value = store[key]
    with store.using([key]):
        return value.resolve() if hasattr(value, "resolve") else value
