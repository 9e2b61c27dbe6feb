"""An allocation that fails on a device: the stores of this process make room for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hpcgpu.spill.devices import Device

if TYPE_CHECKING:
    from hpcgpu.spill.moves import Moves

_T = TypeVar("_T")


class Pressure:
    """A device's ``on_alloc_failure``. Workers in one process share the device, so that there may be several stores."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stores: list[Moves] = []

    def __call__(self, need_bytes: int) -> bool:
        """Return whether a store could make room; in the thread that allocates."""
        return any(moves.make_room(self.device, need_bytes) for moves in tuple(self.stores))

    def evict(self, need_bytes: int) -> bool:
        """Return whether anything moved down from the device; in the thread that allocates."""
        return any(moves.evict(self.device, max(need_bytes, 1)) for moves in tuple(self.stores))


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


def join(device: Device, moves: Moves) -> None:
    """Let a store make room on a device."""
    hook = device.on_alloc_failure
    if not isinstance(hook, Pressure):
        hook = device.on_alloc_failure = Pressure(device)
        _watched.append(hook)
    hook.stores.append(moves)


def leave(device: Device, moves: Moves) -> None:
    """Let a store that closes alone; the last one takes the hook away."""
    hook = device.on_alloc_failure
    if isinstance(hook, Pressure) and moves in hook.stores:
        hook.stores.remove(moves)
        if not hook.stores:
            device.on_alloc_failure = None
            _watched.remove(hook)
