"""Knows values and device buffers again: what is stored twice is counted once, moved once and comes back as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcgpu.spill.devices import Device, device_of, is_device_array, is_left_to_cudf
from hpcgpu.spill.entry import ABSENT, WHOLE, Entry
from hpcgpu.spill.handle import Packed
from hpcgpu.spill.host import HostObjects
from hpcgpu.spill.owners import Held, Name, held_by, name_of
from hpcgpu.spill.part import Part
from hpcgpu.spill.proxy import is_proxy, source_of, unproxy
from hpcgpu.spill.unit import Buffer, Rest, Unit
from hpcgpu.spill.value import Slot, take_apart
from hpcgpu.spill.weak import WeakTable

if TYPE_CHECKING:
    from hpcgpu.spill.keeper import Keeper

logger = logging.getLogger("distributed.worker.memory")
# Arrays and tables in host memory are units of their own from here on: those inside of other values, and those that
# are values; of smaller ones several views may count several times.
_BIG_BYTES, _ALIASED_BYTES = 1 << 16, 1 << 10


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
        self._entries: WeakTable[int, Entry] = WeakTable()
        self._buffers: WeakTable[tuple[int, int], Buffer] = WeakTable()
        self._hosts: WeakTable[Name, HostObjects] = WeakTable()

    def entry_of(self, value: Any) -> Entry:  # noqa: ANN401
        """Return the entry of a value: the one that it has already, or a new one.

        It does not raise: distributed waits for ever when a key from a peer cannot be set (facts/spill.md 3.5).
        """
        if type(value) is np.ndarray and value.base is None and not value.dtype.hasobject:
            return self._entry_of_owner(value)
        known = self._entries.get(id(value))
        if known is not None and known.value is value:
            return known
        try:
            entry = self._entry_of_host(value) or self._entry_of_parts(value)
        except Exception:  # what classes of users do in their __copy__ and __setattr__
            logger.warning("the arrays in a %s cannot be taken out; they stay up", type(value), exc_info=True)
            entry = self._entry(value, value, [])
        if entry.value is not ABSENT and (entry.places or entry.rest.nbytes >= _ALIASED_BYTES):
            self._entries[id(value)] = entry
        return entry

    def _entry_of_owner(self, array: np.ndarray) -> Entry:
        """Return the entry of an array of numbers that is no view: most are, so that it pays to be quick.

        Its memory has the array's own id, so that by its unit also its entry is known, if it was there first.
        """
        name, nbytes, position = id(array), array.nbytes, 0
        if nbytes < _ALIASED_BYTES:
            return Entry(array, Rest(array, nbytes), ())
        unit = self._hosts.get(name)
        if unit is None:
            unit = self._hosts[name] = HostObjects(array, name, nbytes, self._keeper is not None)
        else:
            known = unit.first_user()
            if known is not None and known.value is array:
                return known
            unit, position = self._place_held(array, {name: nbytes})
        entry = Entry(array, WHOLE, ((unit, position),))
        unit.note_user(entry)
        return entry

    def _entry_of_host(self, value: Any) -> Entry | None:  # noqa: ANN401
        """Return the entry of what is in host memory as a whole."""
        held = held_by(value)
        if held and sum(held.values()) >= _ALIASED_BYTES:
            unit, position = self._place_held(value, held)
            entry = Entry(value, WHOLE, [(unit, position)])
            unit.note_user(entry)
            return entry
        return Entry(value, Rest(value, _size_of(value)), ()) if type(value) is np.ndarray else None

    def _entry_of_parts(self, value: Any) -> Entry:  # noqa: ANN401
        rest, parts = take_apart(value, self._is_part if self._keeper else _is_apart)
        return self._entry(value, rest, [self._place(p) for p in parts])

    def entry_of_packed(self, packed: Packed) -> Entry:
        """Return the entry of a value whose buffers came from a peer as host bytes, and stay so until used."""
        buffers = [Buffer.of_packed(device, root, views) for device, root, views in packed.buffers]
        hosts = [self._place_in_host(x) for x in packed.hosts]
        places: list[tuple[Unit, int]] = []
        for b, i, kind in packed.places:
            place = hosts[i] if b is None else (buffers[b], i)
            place[0].note_kind(place[1], kind)
            places.append(place)
        for buffer in buffers:
            self._watch(buffer.device)
        return self._entry(ABSENT, packed.rest, places)

    def note(self, entry: Entry) -> None:
        """Know a value that came back up, and its buffers, when they are stored under another key."""
        self._entries[id(entry.value)] = entry
        for unit in entry.units:
            self.know(unit)

    def know(self, unit: Unit) -> None:
        """Know a part that came back up."""
        if isinstance(unit, Buffer) and unit.arrays:
            self._buffers[id(unit.device), unit.device.buffer_of(unit.arrays[0])[0]] = unit
        elif isinstance(unit, HostObjects):
            for name in unit.names:
                self._hosts[name] = unit

    def _entry(self, value: Any, rest: Any, places: list[tuple[Unit, int]]) -> Entry:  # noqa: ANN401
        lazy = self._keeper is not None and bool(places) and type(rest) is not Slot
        if lazy and self._keeper is not None:
            for unit, i in places:
                unit.note_part(i, Part(self._keeper, unit, i, unit.kind_of(i), unit.nbytes))
        left = WHOLE if type(rest) is Slot else Rest(rest, _size_of(rest))
        entry = Entry(ABSENT if lazy else value, left, places, lazy)
        if places:
            for unit in entry.units:
                if isinstance(unit, HostObjects):
                    unit.note_user(entry)
        return entry

    def _is_part(self, x: Any) -> bool:  # noqa: ANN401
        return _is_apart(x) or is_proxy(x)

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
        if is_device_array(x):
            unit, position = self._place_on_device(x)
            unit.note_kind(position, type(x))
            return unit, position
        return self._place_in_host(x)

    def _place_in_host(self, x: Any) -> tuple[Unit, int]:  # noqa: ANN401
        held = held_by(x)
        if not held:  # what a peer took for a part
            return Rest(x, _size_of(x)), 0
        return self._place_held(x, held)

    def _place_held(self, x: Any, held: Held) -> tuple[HostObjects, int]:  # noqa: ANN401
        name = name_of(held)
        unit = self._hosts.get(name)
        # as on the device: one that moves is left alone, and an id may be that of an allocation that is gone
        if unit is not None and unit.lock.acquire(blocking=False):
            try:
                if name in unit.names:
                    return unit, unit.position_of(x, held)
            finally:
                unit.lock.release()
        unit = self._hosts[name] = HostObjects(x, name, sum(held.values()), self._keeper is not None)
        return unit, 0

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
    return is_device_array(x) or is_left_to_cudf(x) or sum(held_by(x).values()) >= _BIG_BYTES


_size_by_dask: Callable[[Any], int] | None = None


def _size_of(rest: Any) -> int:  # noqa: ANN401
    global _size_by_dask  # noqa: PLW0603 - dask is imported with the first value, not with the store
    if _size_by_dask is None:
        from hpcgpu.spill.dask import size_of

        _size_by_dask = size_of
    return _size_by_dask(rest)
