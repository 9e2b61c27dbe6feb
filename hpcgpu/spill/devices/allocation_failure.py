"""Allocations that fail on a device: the stores of this process make room for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hpcgpu.spill.devices.device import Device

_T = TypeVar("_T")
_FREED_POLL_S = 0.01
# of the devices with stores in this process
_hooks: list[AllocationFailureHook] = []


def on_event_loop() -> bool:
    """Tell whether this thread runs an event loop, which may not wait for a device."""
    return asyncio._get_running_loop() is not None


class AllocationFailureHook:
    """A device's ``on_alloc_failure``. Workers in one process share the device, so there may be several stores."""

    # How long to wait for memory that was moved down but is still held, by an event or a task that has just ended.
    patience_s = 1.0

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stores: dict[Any, None] = {}  # their executors

    def __call__(self, need_bytes: int) -> bool:
        """Return whether a store has made room; called in the thread that allocates."""
        return any(self._make_room(store, need_bytes) for store in tuple(self.stores))

    def evict(self, need_bytes: int) -> bool:
        """Return whether memory became free, kept by a library or moved down; called in the thread that allocates."""
        if self.device.give_back():
            return True
        for store in tuple(self.stores):
            if store.evict(self.device, need_bytes):
                self.device.give_back()  # memory that moved down is free only in its library's pool
                store.count_rescue()
                return True
        return False

    def _make_room(self, store: Any, need_bytes: int) -> bool:
        # even if by used_bytes there is room: it has neither fragments nor other processes
        store.evict(self.device, need_bytes)
        end_s = time.monotonic() + (0 if on_event_loop() else self.patience_s)
        while (over := self.device.used_bytes + need_bytes - self.device.memory_bytes) > 0:
            if not store.evict(self.device, over):
                if time.monotonic() > end_s or not store.may_evict():
                    return False
                time.sleep(_FREED_POLL_S)
        store.count_rescue()
        return True


def evict(number: int, need_bytes: int) -> bool:
    """Move values down from a CUDA device for an allocation that RMM's adaptor tries again as long as this is true."""
    return any(p.evict(need_bytes) for p in tuple(_hooks) if getattr(p.device, "number", number) == number)


def attached_gpu(number: int) -> Any:
    """Return the CUDA device of that number if a store of this process has values on it, else None."""
    return next((hook.device for hook in tuple(_hooks) if getattr(hook.device, "number", None) == number), None)


def with_room(device: Device, need_bytes: int, allocate: Callable[[], _T], collect: Callable[[], object]) -> _T:
    """Return the result of ``allocate``; while it raises MemoryError, make room, call ``collect``, and try again."""
    hook = make_room = device.on_alloc_failure
    while True:  # the freed memory may lie in pieces, or another thread may take it; the end is when no value moves
        try:
            return allocate()
        except MemoryError:  # CuPy's OutOfMemoryError is a subclass; RMM's allocator for CuPy raises it itself
            if make_room is None or not make_room(need_bytes):
                raise
        collect()
        make_room = hook.evict if isinstance(hook, AllocationFailureHook) else None


def attach(device: Device, store: Any) -> None:
    """Let a store make room when allocations fail on a device."""
    hook = device.on_alloc_failure
    if not isinstance(hook, AllocationFailureHook):
        hook = device.on_alloc_failure = AllocationFailureHook(device)
        _hooks.append(hook)
    hook.stores[store] = None


def detach(device: Device, store: Any) -> None:
    """Forget a store that closes; without stores the device has no hook."""
    hook = device.on_alloc_failure
    if isinstance(hook, AllocationFailureHook) and store in hook.stores:
        del hook.stores[store]
        if not hook.stores:
            device.on_alloc_failure = None
            _hooks.remove(hook)
