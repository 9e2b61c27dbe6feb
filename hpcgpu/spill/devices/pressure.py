"""An allocation that fails on a device: the stores of this process make room for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from hpcgpu.spill.devices.protocols import Device

_T = TypeVar("_T")
_FREED_POLL_S = 0.01


class Store(Protocol):
    """What can make room on a device; called in the thread that allocates, by several at once.

    Attributes
    ----------
    rescues : int
        How many allocations went well after it had made room.

    """

    rescues: int

    def evict(self, device: Device, nbytes: int) -> bool:
        """Move so much down from a device, or what can be; return whether anything moved."""


class Pressure:
    """A device's ``on_alloc_failure``. Workers in one process share the device, so that there may be several stores.

    Thread-safe: it goes through a copy of its stores, and each of them is.

    Attributes
    ----------
    stores : list of Store
        Those that are asked, in this order.
    patience_s : float
        How long to wait for what was moved and is still held, by an event or by a task that has just ended.

    """

    patience_s = 1.0

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stores: list[Store] = []

    def __call__(self, need_bytes: int) -> bool:
        """Return whether a store could make room; in the thread that allocates."""
        return any(self._make_room(store, need_bytes) for store in tuple(self.stores))

    def evict(self, need_bytes: int) -> bool:
        """Return whether anything moved down from the device; in the thread that allocates."""
        for store in tuple(self.stores):
            if store.evict(self.device, need_bytes):
                store.rescues += 1
                return True
        return False

    def _make_room(self, store: Store, need_bytes: int) -> bool:
        # even where used_bytes says that there is room: fragments and other processes are not in it
        store.evict(self.device, need_bytes)
        end_s = time.monotonic() + self.patience_s
        while (over := self.device.used_bytes + need_bytes - self.device.memory_bytes) > 0:
            if not store.evict(self.device, over):
                if time.monotonic() > end_s:
                    return False
                time.sleep(_FREED_POLL_S)
        store.rescues += 1
        return True


# of the devices that have stores in this process
_watched: list[Pressure] = []


def evict(number: int, need_bytes: int) -> bool:
    """Move something down from a CUDA device for an allocation that is tried again as long as this returns true.

    RMM's adaptor asks without end: each time something has moved, so that it comes to one.
    """
    return any(p.evict(need_bytes) for p in tuple(_watched) if getattr(p.device, "number", number) == number)


def with_room(device: Device, need_bytes: int, allocate: Callable[[], _T], collect: Callable[[], object]) -> _T:
    """Return what ``allocate`` returns; if that is a MemoryError, stores make room, and it is tried again.

    Not once: what has moved may have lain in pieces, or another thread was faster. But only as long as something moves.
    ``collect`` is called before each new try.
    """
    try:
        return allocate()
    except MemoryError:  # CuPy's own OutOfMemoryError is one; RMM's allocator for CuPy raises it plain
        hook = device.on_alloc_failure
        if hook is None or not hook(need_bytes):
            raise
    while True:
        collect()
        try:
            return allocate()
        except MemoryError:
            if not (isinstance(hook, Pressure) and hook.evict(need_bytes)):
                raise


def join(device: Device, store: Store) -> None:
    """Let a store make room on a device."""
    hook = device.on_alloc_failure
    if not isinstance(hook, Pressure):
        hook = device.on_alloc_failure = Pressure(device)
        _watched.append(hook)
    if store not in hook.stores:
        hook.stores.append(store)


def leave(device: Device, store: Store) -> None:
    """Let a store that closes alone; the last one takes the hook away."""
    hook = device.on_alloc_failure
    if isinstance(hook, Pressure) and store in hook.stores:
        hook.stores.remove(store)
        if not hook.stores:
            device.on_alloc_failure = None
            _watched.remove(hook)
