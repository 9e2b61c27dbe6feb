"""Knows values and device buffers again: what is stored twice is counted once, moved once and comes back as one.

In two steps: :meth:`Catalog.seen` walks a value, which runs code of users and libraries, without the store's lock;
:meth:`Catalog.entry_of` makes its entry, with it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices.arrays import always_moves, device_of, is_device_array, is_left_to_cudf, is_unproxied
from hpcgpu.spill.devices.protocols import Device
from hpcgpu.spill.proxies.part import Part
from hpcgpu.spill.proxies.proxy import is_proxy, source_of, unproxy
from hpcgpu.spill.store.handle import Packed
from hpcgpu.spill.values.buffer import Buffer
from hpcgpu.spill.values.bundle import SMALL_BYTES, Bundles, is_plain
from hpcgpu.spill.values.entry import ABSENT, WHOLE, Entry
from hpcgpu.spill.values.host import HostObjects
from hpcgpu.spill.values.owners import Held, held_by, name_of
from hpcgpu.spill.values.unit import Content, Rest
from hpcgpu.spill.values.value import Slot, is_data, take_apart

logger = logging.getLogger("distributed.worker.memory")
# Arrays and tables in host memory inside of other values are units of their own from here on.
_BIG_BYTES = 1 << 16


class _OnDevice(NamedTuple):
    array: Any
    device: Device
    place: int
    name: Hashable
    nbytes: int


class _InHost(NamedTuple):
    x: Any
    held: Held


class _Packed(NamedTuple):
    device: Device
    place: int
    root: np.ndarray
    views: list[Any]


class _Alone(NamedTuple):
    """What is a unit by itself, known to nobody; ``stays`` if it is not the store's to move."""

    x: Any
    nbytes: int
    stays: bool = False


_Object = _OnDevice | _InHost | _Alone | Part


class Seen(NamedTuple):
    """A value that was walked; ``lazy``: its parts come up one by one. Immutable; Catalog makes it and takes it.

    Attributes
    ----------
    value : object
        ABSENT of one that came from a peer.
    rest : object
        What is left of it without its objects; a Slot of an array or a table.
    rest_bytes : int
        Bytes of that.
    objects : list of objects, or of (buffer, position, type)
        Those that are units, or parts of units.

    """

    value: Any
    rest: Any
    rest_bytes: int = 0
    objects: Any = ()
    lazy: bool = False


_OWNER = Slot(0)


class Catalog:
    """Makes entries of values. Keeper makes it. :meth:`seen` runs in any thread, the rest under the store's lock.

    Parameters
    ----------
    known : dict
        Units by the names of their allocations; who moves them takes them out.
    values : dict of int to Entry
        Entries by the ids of their values, likewise.
    place_of : callable
        Returns the place of a device.
    keeper : object
        The store's; whose parts are its own.
    lazily : bool
        Parts of values come up one by one (jit_unspill).

    """

    def __init__(
        self,
        known: dict[Any, Content],
        values: dict[int, Entry],
        place_of: Callable[[Device], int],
        keeper: object,
        lazily: bool,
    ) -> None:
        self._known, self._values, self._place_of = known, values, place_of
        self._keeper, self._lazily = keeper, lazily
        self._bundles = Bundles()

    def seen(self, value: Any) -> Seen:  # noqa: ANN401
        """Return what is in a value; without the lock.

        It does not raise: distributed waits for ever when a key from a peer cannot be set (docs/facts/spill.md).
        """
        if isinstance(value, Packed):
            return self._seen_packed(value)
        try:
            return self._seen_as_one(value) or self._seen_in_parts(value)
        except Exception:  # what classes of users do in their __copy__ and __setattr__
            # as text: handlers that keep records would keep the frames, with the arrays and proxies in them
            logger.warning("the arrays in a %s stay up, since: %s", type(value), traceback.format_exc())
            return Seen(value, value, _size_of(value))

    def entry_of(self, seen: Seen, grown: list[tuple[Content, int]]) -> Entry:
        """Return the entry of a value: the one that it has already, or a new one. Under the lock.

        ``grown`` gets the units that objects have joined, and their bytes now.
        """
        value = seen.value
        if (known := self._values.get(id(value))) is not None:
            return known
        if value is ABSENT:
            made: dict[int, Any] = {}
            places = []
            for x, i, kind in seen.objects:
                if id(x) not in made:
                    made[id(x)] = self._unit_of_packed(x, grown)
                unit, position = made[id(x)]
                places.append((unit, i if isinstance(x, _Packed) else position))
                unit.note_kind(places[-1][1], kind)
        else:
            places = [self._placed(x, grown) for x in seen.objects]
        rest = WHOLE if type(seen.rest) is Slot else Rest(seen.rest, seen.rest_bytes)
        if not places and rest.nbytes < SMALL_BYTES and is_plain(seen.rest):
            self._bundles.add(rest)
        entry = Entry(ABSENT if seen.lazy else value, rest, places, seen.lazy)
        if entry.value is not ABSENT and (places or rest.nbytes >= SMALL_BYTES):
            self._values[id(value)] = entry
        return entry

    def entry_of_owner(self, array: np.ndarray) -> Entry:
        """Return the entry of an array of numbers that is no view: most are, so that it pays to be quick.

        Its memory has the array's own id. Under the lock.
        """
        number, nbytes = id(array), array.nbytes
        if nbytes < SMALL_BYTES:
            return Entry(array, self._bundles.add(Rest(array, nbytes)), ())
        if (entry := self._values.get(number)) is None:
            unit, position = self._known.get(number), 0
            if isinstance(unit, HostObjects):  # a view of it was there first
                position, _ = unit.position_of(array, {number: nbytes})
            else:
                unit = self._known[number] = HostObjects(array, {number: nbytes})
            entry = self._values[number] = Entry(array, WHOLE, ((unit, position),))
        return entry

    def note(self, entry: Entry) -> None:
        """Know a value that came back up when it is stored under another key. Under the lock."""
        self._values[id(entry.value)] = entry

    def _seen_packed(self, packed: Packed) -> Seen:
        """Return what is in a value whose buffers came from a peer as host bytes, and stay so until used."""
        buffers = [_Packed(d, self._place_of(d), root, views) for d, root, views in packed.buffers]
        hosts = [self._seen_object(x) for x in packed.hosts]
        objects = [(hosts[i], 0, kind) if b is None else (buffers[b], i, kind) for b, i, kind in packed.places]
        if type(packed.rest) is Slot:
            return Seen(ABSENT, packed.rest, 0, objects)
        lazy = self._is_lazy(packed.rest, [kind for _, _, kind in packed.places])
        return Seen(ABSENT, packed.rest, _size_of(packed.rest), objects, lazy)

    def _seen_as_one(self, value: Any) -> Seen | None:  # noqa: ANN401
        """Return what is in host memory as a whole."""
        held = held_by(value)
        if held and sum(held.values()) >= SMALL_BYTES:
            return Seen(value, _OWNER, 0, (_InHost(value, held),))
        return Seen(value, value, _size_of(value)) if type(value) is np.ndarray else None

    def _seen_in_parts(self, value: Any) -> Seen:  # noqa: ANN401
        rest, parts = take_apart(value, self._is_part if self._lazily else _is_apart)
        objects = [self._seen_object(p) for p in parts]
        if type(rest) is Slot:
            return Seen(value, rest, 0, objects)
        kinds = [source_of(p).kind if is_proxy(p) else type(p) for p in parts]
        return Seen(value, rest, _size_of(rest), objects, self._is_lazy(rest, kinds))

    def _is_lazy(self, rest: Any, kinds: Sequence[type]) -> bool:  # noqa: ANN401
        # methods of objects hand their arrays to compiled code, which takes no proxies: they come up with the object
        return self._lazily and bool(kinds) and is_data(rest) and not any(map(is_unproxied, kinds))

    def _seen_object(self, x: Any) -> _Object:  # noqa: ANN401
        if self._lazily and is_proxy(x):
            source = source_of(x)
            if isinstance(source, Part) and source.keeper is self._keeper:
                return source
            x = unproxy(x)  # of another store: it comes up
        if is_left_to_cudf(x):
            return _Alone(x, 0, stays=True)  # counted and moved by cuDF alone
        if is_device_array(x):
            device = device_of(x)
            assert device is not None
            name, nbytes = device.buffer_of(x)
            return _OnDevice(x, device, self._place_of(device), (id(device), name), nbytes)
        return self._seen_in_host(x)

    def _seen_in_host(self, x: Any) -> _InHost | _Alone:  # noqa: ANN401
        held = held_by(x)
        return _InHost(x, held) if held else _Alone(x, _size_of(x))  # the latter a peer took for a part

    def _is_part(self, x: Any) -> bool:  # noqa: ANN401
        return _is_apart(x) or is_proxy(x)

    def _placed(self, x: _Object, grown: list[tuple[Content, int]]) -> tuple[Content, int]:
        """Return the unit of an object, and its position there."""
        if isinstance(x, Part):
            return x.unit, x.index
        if isinstance(x, _OnDevice):
            return self._placed_on_device(x, grown)
        if isinstance(x, _InHost):
            return self._placed_in_host(x, grown)
        alone = Rest(x.x, x.nbytes)
        alone.fixed = x.stays
        alone.note_kind(0, type(x.x))
        return alone, 0

    def _unit_of_packed(self, x: Any, grown: list[tuple[Content, int]]) -> tuple[Content, int]:  # noqa: ANN401
        if isinstance(x, _Packed):
            buffer = Buffer.of_packed(*x)
            self._bundles.add(buffer)
            return buffer, 0
        return self._placed(x, grown)

    def _placed_in_host(self, x: _InHost, grown: list[tuple[Content, int]]) -> tuple[Content, int]:
        name = name_of(x.held)
        unit = self._known.get(name)
        if isinstance(unit, HostObjects):
            position, is_new = unit.position_of(x.x, x.held)
            if is_new:
                grown.append((unit, unit.measured()))
        else:
            unit, position = HostObjects(x.x, x.held), 0
        for each in unit.names:
            self._known[each] = unit
        return unit, position

    def _placed_on_device(self, x: _OnDevice, grown: list[tuple[Content, int]]) -> tuple[Content, int]:
        unit = self._known.get(x.name)
        if isinstance(unit, Buffer):
            position, is_new = unit.position_of(x.array)
            if is_new:
                grown.append((unit.unit, unit.unit.nbytes))
        else:
            unit = self._known[x.name] = Buffer(x.device, x.nbytes, x.place, x.name)
            position, _ = unit.position_of(x.array)
            if always_moves(type(x.array)):
                self._bundles.add(unit)
        unit.note_kind(position, type(x.array))
        return unit, position


def is_owner(x: Any) -> bool:  # noqa: ANN401
    """Tell whether something is an array of numbers in host memory, and no view."""
    return type(x) is np.ndarray and x.base is None and not x.dtype.hasobject


def _is_apart(x: Any) -> bool:  # noqa: ANN401
    return is_device_array(x) or is_left_to_cudf(x) or sum(held_by(x).values()) >= _BIG_BYTES


_size_by_dask: Callable[[Any], int] | None = None


def _size_of(rest: Any) -> int:  # noqa: ANN401
    global _size_by_dask  # noqa: PLW0603 - dask is imported with the first value, not with the store
    if _size_by_dask is None:
        from hpcgpu.spill.storage.dask_bytes import size_of

        _size_by_dask = size_of
    return _size_by_dask(rest)
