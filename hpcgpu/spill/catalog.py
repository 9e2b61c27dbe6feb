"""Knows values and device buffers again: what is stored twice is counted once, moved once and comes back as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from hpcgpu.spill.devices import Device, device_of, is_device_array
from hpcgpu.spill.entry import ABSENT, Entry
from hpcgpu.spill.handle import Packed
from hpcgpu.spill.unit import Buffer, Rest
from hpcgpu.spill.value import take_apart

logger = logging.getLogger("distributed.worker.memory")


class Catalog:
    """Makes entries of values; called under the store's lock.

    Parameters
    ----------
    watch : callable
        Called with the device of every new buffer.

    """

    def __init__(self, watch: Callable[[Device], None]) -> None:
        self._watch = watch
        self._entries: WeakValueDictionary[int, Entry] = WeakValueDictionary()
        self._buffers: WeakValueDictionary[tuple[int, int], Buffer] = WeakValueDictionary()

    def entry_of(self, value: Any) -> Entry:  # noqa: ANN401
        """Return the entry of a value: the one that it has already, or a new one.

        It does not raise: distributed waits for ever when a key from a peer cannot be set (facts/spill.md 3.5).
        """
        known = self._entries.get(id(value))
        if known is not None and known.value is value:
            return known
        try:
            rest, arrays = take_apart(value, is_device_array)
        except Exception:  # what classes of users do in their __copy__ and __setattr__
            logger.warning("the arrays in a %s cannot be taken out; they stay up", type(value), exc_info=True)
            rest, arrays = value, []
        entry = Entry(value, Rest(rest, _size_of(rest)), [self._place(a) for a in arrays])
        self._entries[id(value)] = entry
        return entry

    def entry_of_packed(self, packed: Packed) -> Entry:
        """Return the entry of a value whose buffers came from a peer as host bytes, and stay so until used."""
        buffers = [Buffer.of_packed(device, root, views) for device, root, views in packed.buffers]
        places = [(buffers[b], i) for b, i in packed.places]
        for buffer in buffers:
            self._watch(buffer.device)
        return Entry(ABSENT, Rest(packed.rest, _size_of(packed.rest)), places)

    def note(self, entry: Entry) -> None:
        """Know a value that came back up, and its buffers, when they are stored under another key."""
        self._entries[id(entry.value)] = entry
        for buffer, _ in entry.places:
            self._buffers[id(buffer.device), buffer.device.buffer_of(buffer.arrays[0])[0]] = buffer

    def _place(self, array: Any) -> tuple[Buffer, int]:  # noqa: ANN401
        device = device_of(array)
        assert device is not None
        name, nbytes = device.buffer_of(array)
        buffer = self._buffers.get((id(device), name))
        # one that moves just now is left alone: the array gets a buffer of its own then
        if buffer is not None and buffer.lock.acquire(blocking=False):
            try:
                # the id may be that of an allocation that is gone
                if buffer.arrays and device.buffer_of(buffer.arrays[0])[0] == name:
                    return buffer, buffer.position_of(array)
            finally:
                buffer.lock.release()
        buffer = self._buffers[id(device), name] = Buffer(device, nbytes)
        self._watch(device)
        return buffer, buffer.position_of(array)


def _size_of(rest: Any) -> int:  # noqa: ANN401
    from hpcgpu.spill.dask import size_of

    return size_of(rest)
