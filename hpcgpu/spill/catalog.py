"""Knows values and device buffers again: what is stored twice is counted once, moved once and comes back as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from hpcgpu.spill.devices import Device, device_of, is_device_array, is_left_to_cudf
from hpcgpu.spill.entry import ABSENT, Entry
from hpcgpu.spill.handle import Packed
from hpcgpu.spill.part import Part
from hpcgpu.spill.proxy import is_proxy, source_of, unproxy
from hpcgpu.spill.unit import Buffer, Rest, Unit
from hpcgpu.spill.value import Slot, take_apart

if TYPE_CHECKING:
    from hpcgpu.spill.keeper import Keeper

logger = logging.getLogger("distributed.worker.memory")
_BIG_BYTES = 1 << 16
_ALIASED_BYTES = 1 << 10  # what is smaller may count twice
_HOST_KINDS = {"ndarray": ("numpy",), "DataFrame": ("pandas",), "Series": ("pandas",), "Table": ("pyarrow",)}


class Catalog:
    """Makes entries of values; called under the store's lock.

    Parameters
    ----------
    watch : callable
        Called with the device of every new buffer.
    lazily : Keeper, optional
        The store's, if parts of values shall come up one by one (jit_unspill).

    """

    def __init__(self, watch: Callable[[Device], None], lazily: Keeper | None = None) -> None:
        self._watch, self._keeper = watch, lazily
        self._entries: WeakValueDictionary[int, Entry] = WeakValueDictionary()
        self._buffers: WeakValueDictionary[tuple[int, int], Buffer] = WeakValueDictionary()
        self._hosts: WeakValueDictionary[int, Rest] = WeakValueDictionary()

    def entry_of(self, value: Any) -> Entry:  # noqa: ANN401
        """Return the entry of a value: the one that it has already, or a new one.

        It does not raise: distributed waits for ever when a key from a peer cannot be set (facts/spill.md 3.5).
        """
        known = self._entries.get(id(value))
        if known is not None and known.value is value:
            return known
        try:
            rest, parts = take_apart(value, self._is_part if self._keeper else _is_apart)
        except Exception:  # what classes of users do in their __copy__ and __setattr__
            logger.warning("the arrays in a %s cannot be taken out; they stay up", type(value), exc_info=True)
            rest, parts = value, []
        entry = self._entry(value, rest, [self._place(p) for p in parts])
        if entry.value is not ABSENT and (parts or entry.rest.nbytes >= _ALIASED_BYTES):
            self._entries[id(value)] = entry
        return entry

    def entry_of_packed(self, packed: Packed) -> Entry:
        """Return the entry of a value whose buffers came from a peer as host bytes, and stay so until used."""
        buffers = [Buffer.of_packed(device, root, views) for device, root, views in packed.buffers]
        hosts = [Rest(value, _size_of(value)) for value in packed.hosts]
        places: list[tuple[Unit, int]] = []
        for b, i, kind in packed.places:
            place = (hosts[i], 0) if b is None else (buffers[b], i)
            place[0].note_kind(place[1], kind)
            places.append(place)
        for buffer in buffers:
            self._watch(buffer.device)
        return self._entry(ABSENT, packed.rest, places)

    def note(self, entry: Entry) -> None:
        """Know a value that came back up, and its buffers, when they are stored under another key."""
        self._entries[id(entry.value)] = entry
        for unit, _ in entry.places:
            if isinstance(unit, Buffer) and unit.arrays:
                self.know(unit)

    def know(self, buffer: Buffer) -> None:
        """Know a buffer that came back up."""
        self._buffers[id(buffer.device), buffer.device.buffer_of(buffer.arrays[0])[0]] = buffer

    def _entry(self, value: Any, rest: Any, places: list[tuple[Unit, int]]) -> Entry:  # noqa: ANN401
        lazy = self._keeper is not None and bool(places) and type(rest) is not Slot
        if lazy and self._keeper is not None:
            for unit, i in places:
                unit.note_part(i, Part(self._keeper, unit, i, unit.kind_of(i), unit.nbytes))
        return Entry(ABSENT if lazy else value, Rest(rest, _size_of(rest)), places, lazy)

    def _is_part(self, x: Any) -> bool:  # noqa: ANN401
        return _is_apart(x) or is_proxy(x) or _is_big(x)

    def _place(self, x: Any) -> tuple[Unit, int]:  # noqa: ANN401
        if self._keeper and is_proxy(x):
            source = source_of(x)
            if isinstance(source, Part) and source.keeper is self._keeper:
                source.unit.note_part(source.index, source)  # it may have had no key for a while
                return source.unit, source.index
            x = unproxy(x)
        if is_left_to_cudf(x):
            left = Rest(x, 0)  # counted and moved by cuDF alone
            left.pins = 1
            left.note_kind(0, type(x))
            return left, 0
        unit, position = self._place_on_device(x) if is_device_array(x) else (self._host_unit(x), 0)
        unit.note_kind(position, type(x))
        return unit, position

    def _host_unit(self, x: Any) -> Rest:  # noqa: ANN401
        known = self._hosts.get(id(x))
        if known is None or known.value is not x:
            known = self._hosts[id(x)] = Rest(x, _size_of(x))
        return known

    def _place_on_device(self, array: Any) -> tuple[Buffer, int]:  # noqa: ANN401
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


def _is_apart(x: Any) -> bool:  # noqa: ANN401
    return is_device_array(x) or is_left_to_cudf(x)


def _is_big(x: Any) -> bool:  # noqa: ANN401
    """Tell an object in host memory that is worth moving by itself: an array, or a data frame."""
    kind = type(x)
    return kind.__module__.partition(".")[0] in _HOST_KINDS.get(kind.__name__, ()) and _size_of(x) >= _BIG_BYTES


_size_by_dask: Callable[[Any], int] | None = None


def _size_of(rest: Any) -> int:  # noqa: ANN401
    global _size_by_dask  # noqa: PLW0603 - dask is imported with the first value, not with the store
    if _size_by_dask is None:
        from hpcgpu.spill.dask import size_of

        _size_by_dask = size_of
    return _size_by_dask(rest)
