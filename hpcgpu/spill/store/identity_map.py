"""Recognizes values and device buffers: an object that is stored twice counts once, moves once and comes back as one.

There are two steps. :meth:`IdentityMap.traverse` looks into a value, which runs code of users and libraries, without
the store's lock. :meth:`IdentityMap.entry_of` makes the value's entry, under the lock. A :class:`Reader` makes the
value of an entry: it brings up the units that are below, in the calling thread, and keeps them up while in use.
"""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices import Device
from hpcgpu.spill.devices.cuda import (
    always_moves,
    device_of,
    is_device_array,
    is_immovable,
    is_left_to_cudf,
    is_unproxied,
)
from hpcgpu.spill.proxies import proxy as proxy_dask
from hpcgpu.spill.proxies.proxy import StoredObject, is_proxy, source_of, unproxy
from hpcgpu.spill.store import Handle, Packed, Todo
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.values import Slot, is_data, put_together, take_apart
from hpcgpu.spill.values.host_objects import Held, HostObjects, held_by, name_of, size_of
from hpcgpu.spill.values.unit import (
    ABSENT,
    NO_SKELETON,
    SMALL_BYTES,
    Buffer,
    Bundles,
    Content,
    Entry,
    ObjectContent,
    SkeletonUnit,
    each_once,
    is_plain,
)

logger = logging.getLogger("distributed.worker.memory")
# An array or a table in host memory inside another value is a unit of its own from this size on.
_BIG_BYTES = 1 << 16


class _OnDevice(NamedTuple):
    array: Any
    device: Device
    tier: int
    name: Hashable
    nbytes: int


class _InHost(NamedTuple):
    x: Any
    held: Held


class _Packed(NamedTuple):
    device: Device
    tier: int
    root: np.ndarray
    views: list[Any]


class _Alone(NamedTuple):
    """An object that is a unit by itself, and in no index."""

    x: Any
    nbytes: int
    stays: bool = False  # the store must not move it


_Object = _OnDevice | _InHost | _Alone | StoredObject


class Traversed(NamedTuple):
    """A value after its traversal. Immutable; only IdentityMap uses it."""

    value: Any  # ABSENT if it came from a peer
    skeleton: Any  # the value without its objects; a Slot if it is an array or a table
    skeleton_bytes: int = 0
    objects: Any = ()  # units, or parts of units; from a peer (buffer, position, type) of each
    lazy: bool = False  # its parts come up one by one


_OWNER = Slot(0)


class IdentityMap:
    """Makes entries of values. ``traverse`` runs in any thread, the other methods under the store's lock."""

    # Executor removes units and values that move from ``contents`` (by the names of their allocations) and ``values``
    # (by their ids); ``reader`` distinguishes proxies of this store from others

    def __init__(
        self,
        contents: dict[Any, ObjectContent],
        values: dict[int, Entry],
        tier_of: Callable[[Device], int],
        reader: object,
        lazily: bool,
    ) -> None:
        self._contents, self._values, self._tier_of = contents, values, tier_of
        self._reader, self._lazily = reader, lazily
        self._bundles = Bundles()

    def traverse(self, value: Any) -> Traversed:
        """Return the parts of a value; without the lock. It never raises: distributed would wait for ever."""
        if isinstance(value, Packed):
            return self._traversed_packed(value)
        try:
            held = held_by(value)
            if held and sum(held.values()) >= SMALL_BYTES:  # one object in host memory
                return Traversed(value, _OWNER, 0, (_InHost(value, held),))
            if type(value) is np.ndarray:
                return Traversed(value, value, size_of(value))
            return self._traversed_in_parts(value)
        except Exception:  # of the __copy__ or __setattr__ of a user's class
            # as text: a log handler that keeps records would keep the frames, with the arrays and proxies in them
            logger.warning("the arrays in a %s stay up, since: %s", type(value), traceback.format_exc())
            return Traversed(value, value, size_of(value))

    def entry_of(self, traversed: Traversed, sizes: list[tuple[Content, int]]) -> Entry:
        """Return the existing or new entry of a value; ``sizes`` gets grown units and their sizes. Under the lock."""
        value = traversed.value
        if (existing := self._values.get(id(value))) is not None:
            return existing
        if value is ABSENT:
            made: dict[int, Any] = {}
            locations: list[tuple[ObjectContent, int]] = []
            for x, i, kind in traversed.objects:
                if id(x) not in made:
                    if isinstance(x, _Packed):
                        made[id(x)] = self._bundles.add(Buffer.of_packed(*x)), 0
                    else:
                        made[id(x)] = self._located(x, sizes)
                unit, position = made[id(x)]
                locations.append((unit, i if isinstance(x, _Packed) else position))
                unit.set_kind(locations[-1][1], kind)
        else:
            locations = [self._located(x, sizes) for x in traversed.objects]
        is_one = type(traversed.skeleton) is Slot
        skeleton = NO_SKELETON if is_one else SkeletonUnit(traversed.skeleton, traversed.skeleton_bytes)
        if not locations and skeleton.nbytes < SMALL_BYTES and is_plain(traversed.skeleton):
            self._bundles.add(skeleton)
        entry = Entry(ABSENT if traversed.lazy else value, skeleton, locations, traversed.lazy)
        if entry.value is not ABSENT and (locations or skeleton.nbytes >= SMALL_BYTES):
            self._values[id(value)] = entry
        return entry

    def entry_of_owner(self, array: np.ndarray) -> Entry:
        """Return the entry of an array of numbers that is no view: a short way for most arrays. Under the lock."""
        # the name of the array's memory is its own id
        number, nbytes = id(array), array.nbytes
        if nbytes < SMALL_BYTES:
            return Entry(array, self._bundles.add(SkeletonUnit(array, nbytes)), ())
        if (entry := self._values.get(number)) is None:
            unit, position = self._contents.get(number), 0
            if unit is not None and isinstance(unit, HostObjects):  # a view of it was stored before
                position, _ = unit.position_of(array, {number: nbytes})
            else:
                unit = self._contents[number] = HostObjects(array, number, nbytes)
            entry = self._values[number] = Entry(array, NO_SKELETON, ((unit, position),))
        return entry

    def _traversed_packed(self, packed: Packed) -> Traversed:
        """Return the parts of a value from a peer, whose buffers stay host bytes until their first use."""
        buffers = [_Packed(d, self._tier_of(d), root, views) for d, root, views in packed.buffers]
        hosts = [self._traversed_object(x) for x in packed.hosts]
        objects = [(hosts[i], 0, kind) if b is None else (buffers[b], i, kind) for b, i, kind in packed.locations]
        if type(packed.skeleton) is Slot:
            return Traversed(ABSENT, packed.skeleton, 0, objects)
        lazy = self._is_lazy(packed.skeleton, [kind for _, _, kind in packed.locations])
        return Traversed(ABSENT, packed.skeleton, size_of(packed.skeleton), objects, lazy)

    def _traversed_in_parts(self, value: Any) -> Traversed:
        skeleton, parts = take_apart(value, (lambda x: _is_part(x) or is_proxy(x)) if self._lazily else _is_part)
        objects = [self._traversed_object(p) for p in parts]
        if type(skeleton) is Slot:
            return Traversed(value, skeleton, 0, objects)
        kinds = [source_of(p).kind if is_proxy(p) else type(p) for p in parts]
        return Traversed(value, skeleton, size_of(skeleton), objects, self._is_lazy(skeleton, kinds))

    def _is_lazy(self, skeleton: Any, kinds: Sequence[type]) -> bool:
        # Methods give an object's arrays to compiled code, which takes no proxies. So the arrays come up with the
        # object.
        return self._lazily and bool(kinds) and is_data(skeleton) and not any(map(is_unproxied, kinds))

    def _traversed_object(self, x: Any) -> _Object:
        if self._lazily and is_proxy(x):
            source = source_of(x)
            if isinstance(source, StoredObject) and source.reader is self._reader:
                return source
            x = unproxy(x)  # a proxy of another store: its object comes up
        if is_left_to_cudf(x):
            return _Alone(x, 0, stays=True)  # only cuDF counts and moves it
        if is_device_array(x):
            device = device_of(x)
            assert device is not None
            name, nbytes = device.buffer_of(x)
            return _OnDevice(x, device, self._tier_of(device), (id(device), name), nbytes)
        held = held_by(x)
        return _InHost(x, held) if held else _Alone(x, size_of(x))  # _Alone: the peer took it for a part

    def _located(self, x: _Object, sizes: list[tuple[Content, int]]) -> tuple[ObjectContent, int]:
        """Return the unit of an object, and its position there."""
        if isinstance(x, StoredObject):
            return x.unit, x.index
        if isinstance(x, _OnDevice):
            return self._located_on_device(x, sizes)
        if isinstance(x, _InHost):
            return self._located_in_host(x, sizes)
        alone = SkeletonUnit(x.x, x.nbytes)
        alone.fixed = x.stays
        alone.set_kind(0, type(x.x))
        return alone, 0

    def _located_in_host(self, x: _InHost, sizes: list[tuple[Content, int]]) -> tuple[ObjectContent, int]:
        unit = self._contents.get(name_of(x.held))
        if isinstance(unit, HostObjects):
            position, is_new = unit.position_of(x.x, x.held)
            if is_new:
                sizes.append((unit, unit.measured()))
        else:
            unit, position = HostObjects.of_held(x.x, x.held), 0
        for name in unit.names:
            self._contents[name] = unit
        return unit, position

    def _located_on_device(self, x: _OnDevice, sizes: list[tuple[Content, int]]) -> tuple[ObjectContent, int]:
        unit = self._contents.get(x.name)
        if isinstance(unit, Buffer):
            position, is_new = unit.position_of(x.array)
            if is_new:
                sizes.append((unit.unit, unit.unit.nbytes))
        else:
            unit = self._contents[x.name] = Buffer(x.device, x.nbytes, x.tier, x.name)
            position, _ = unit.position_of(x.array)
            if always_moves(type(x.array)):
                self._bundles.add(unit)
        unit.set_kind(position, type(x.array))
        return unit, position


class Reader:
    """The store, as handles and proxies see it. Thread-safe; methods other than ``handle`` wait, without the lock."""

    def __init__(self, executor: Executor, lazily: bool) -> None:
        if lazily:  # parts of values come up one by one (jit_unspill)
            proxy_dask.register()
        self._executor = executor
        self.lock, self.orphans = executor.lock, executor.orphans
        self.identity_map = IdentityMap(executor.contents, executor.values, executor.tier_of, self, lazily)

    def read(self, entry: Entry, todo: Todo) -> Any:
        """Bring up a value for code that may write to it; then take the name that the caller gave the entry."""
        try:
            self._executor.carry_out(todo)
            return self.restore(entry, writes=True)
        finally:
            todo = Todo()
            with self.lock:
                self._executor.unname(entry, todo)
            self._executor.carry_out(todo)

    def restore(self, entry: Entry, *, writes: bool = False) -> Any:
        """Bring up the value of an entry that has a name, and return it; raises as :meth:`keeping_up`."""
        # a pin is not enough: without a name members of a bundle go, and parts of a value that comes up by parts
        with self._executor.needing(entry.used_units, writes=writes):
            return self._assemble(entry)

    def _assemble(self, entry: Entry) -> Any:
        """Return the value of an entry that has a name; its used units are up, and pinned."""
        value = entry.value
        if value is not ABSENT:
            return value
        if entry.lazy:
            parts = [self._part(unit, i).proxy() for unit, i in entry.locations]
        else:
            parts = [unit.object_at(i) for unit, i in entry.locations]
        value = put_together(entry.skeleton.value, parts)
        with self.lock:
            if entry.value is not ABSENT:  # another thread was faster: all readers get the same value
                return entry.value
            entry.value = value
            self._executor.values[id(value)] = entry  # in case it is stored under another key
        return value

    @contextmanager
    def keeping_up(self, unit: ObjectContent) -> Iterator[None]:
        """Keep a part of a value up, for its proxy; SpillError if it cannot be read back."""
        with self._executor.needing((unit.unit,)):
            yield

    def written(self, unit: ObjectContent) -> None:
        """Record a write to a unit that is kept up."""
        self._executor.report(self._executor.state.used, (unit.unit,), True)

    def packed(self, entry: Entry) -> Packed:
        """Return the value of an entry as host bytes, without copies to the device; raises as :meth:`keeping_up`."""
        disk = self._executor.disk
        with self._executor.needing(entry.units, for_peer=True):
            contents = each_once(entry.locations)
            buffers: list[Any] = [c for c in contents if isinstance(c, Buffer) and not any(map(is_immovable, c.arrays))]
            hosts = [at for at in dict.fromkeys(entry.locations) if at[0] not in buffers]
            locations = tuple(
                (None, hosts.index((u, i)), u.kind_of(i)) if (u, i) in hosts else (buffers.index(u), i, u.kind_of(i))
                for u, i in entry.locations
            )
            roots = tuple((b.device, *b.packed(disk)) for b in buffers)
            return Packed(entry.skeleton.value, locations, roots, tuple(u.object_at(i) for u, i in hosts))

    def handle(self, entry: Entry, todo: Todo) -> Handle:
        """Return a handle of an entry; under the lock."""
        self._executor.record(self._executor.name(entry), todo)
        return Handle(self, entry)

    def _part(self, unit: ObjectContent, index: int) -> StoredObject:
        """Return the stored object of a proxy: the existing one, or a new one."""
        made = StoredObject(self, unit, index)
        todo = Todo()
        with self.lock:
            objects = unit.stored_objects = {} if unit.stored_objects is None else unit.stored_objects
            existing = objects[index]() if index in objects else None
            if existing is None:
                objects[index] = weakref.ref(made)
                if unit.bundle is not None:
                    self._executor.state.join(unit.bundle, unit)
                self._executor.record(self._executor.state.set(made.token, (unit.unit,)), todo)
        self._executor.carry_out(todo)
        return existing if isinstance(existing, StoredObject) else made


def _is_part(x: Any) -> bool:
    return is_device_array(x) or is_left_to_cudf(x) or sum(held_by(x).values()) >= _BIG_BYTES
