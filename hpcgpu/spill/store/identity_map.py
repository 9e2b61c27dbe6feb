"""Recognizes values and device buffers: an object that is stored twice counts once, moves once, comes back as one."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hpcgpu.spill import proxies as proxies
from hpcgpu.spill.devices.cuda import always_moves, device_of, is_device_array, is_immovable, is_left_to_cudf
from hpcgpu.spill.devices.device import Device
from hpcgpu.spill.devices.libraries import UNPROXIED, library_of
from hpcgpu.spill.proxies import is_proxy, make_proxy, source_of, unproxy
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.handles import Handle, Packed
from hpcgpu.spill.store.inbox import Todo
from hpcgpu.spill.values.containers import is_data
from hpcgpu.spill.values.host_objects import Held, HostObjects, held_by, name_of, size_of
from hpcgpu.spill.values.take_apart import Slot, put_together, take_apart
from hpcgpu.spill.values.unit import (
    ABSENT,
    NO_SKELETON,
    SMALL_BYTES,
    Buffer,
    Buffers,
    Bundle,
    Content,
    Entry,
    Location,
    ObjectContent,
    SkeletonUnit,
    Values,
    each_once,
    is_plain,
)

logger = logging.getLogger("distributed.worker.memory")
# An array or a table in host memory inside another value is a unit of its own from this size on.
_BIG_BYTES = 1 << 16
_Content = TypeVar("_Content", Buffer, SkeletonUnit)
# The units that have a new object, and their sizes.
Sizes = list[tuple[Content, int]]


# Finds or makes the unit of a part, under the lock.
Locate = Callable[[Sizes], Location]


class StoredObject(Handle):
    """A device array, or a big object in host memory, inside a stored value: it lives as long as it has a proxy.

    Thread-safe: proxies call it in the threads of tasks, and the store (release) in the thread that moves the object
    down. Its entry names one unit, so the object lives as long.
    """

    __slots__ = ("__weakref__", "_proxy", "index", "kind", "unit")

    def __init__(self, reader: Reader, entry: Entry) -> None:
        super().__init__(reader, entry)
        ((self.unit, self.index),) = entry.locations
        self.kind = self.unit.kind_of(self.index)
        self._proxy: Any = None

    def proxy(self) -> Any:
        """Return the object's proxy: the existing one, or a new one."""
        made = None
        while True:
            with self.reader.lock:
                proxy = self._proxy() if self._proxy is not None else None
                if proxy is None and made is not None:
                    self._proxy, proxy = weakref.ref(made), made
            if proxy is not None:
                return proxy
            made = make_proxy(self)

    def release(self) -> None:
        """Take the object from its proxy, if there is one, since the object moves down."""
        if self._proxy is not None and (proxy := self._proxy()) is not None:
            proxies.release(proxy)

    def answers(self) -> Mapping[str, Any]:
        """Return the object's ``len`` and ``name``, without loading, as far as a copy below has them."""
        return self.unit.answers_of(self.index)

    @contextmanager
    def using(self) -> Iterator[Any]:
        """Keep the object up while inside, and return it."""
        with self.reader.executor.needing(self.entry.units):
            yield self.unit.object_at(self.index)

    def dirty(self) -> None:
        """Record that the object was written to, so that copies of it do not count."""
        self.reader.executor.report(self.reader.executor.state.used, self.entry.units, True)


class Reader:
    """Makes entries of values, and values of entries; the store, as handles and proxies see it. Thread-safe.

    :meth:`traverse` looks into a value, which runs code of users and libraries, without the store's lock. Its result
    makes the value's entry, under the lock. Other methods bring up the units that are below, in the calling thread, and
    keep them up while in use.

    Executor removes units and values that move from its ``contents`` (by the names of their allocations) and ``values``
    (by their ids).
    """

    def __init__(self, executor: Executor, lazily: bool) -> None:
        if lazily:  # parts of values come up one by one (jit_unspill)
            proxies.register()
        self.executor, self._lazily = executor, lazily
        self.lock, self.orphans = executor.lock, executor.orphans
        self._contents, self._values = executor.contents, executor.values
        self._open: dict[tuple[int, int], Bundle] = {}  # bundles, by the tiers of use and of the data

    # --- entries of values --------------------------------------------------------------------------------------------
    def traverse(self, value: Any) -> Callable[[Todo], Entry]:
        """Find a value's parts, without the lock; return the function that makes its entry, under it. Never raises."""
        if isinstance(value, Packed):
            return self._traverse_packed(value)
        try:
            held = held_by(value)
            if held and sum(held.values()) >= SMALL_BYTES:  # one object in host memory
                return self._maker(value, Slot(0), [partial(self._locate_in_host, value, held)])
            skeleton, objects = take_apart(value, (lambda x: _is_part(x) or is_proxy(x)) if self._lazily else _is_part)
            parts = [self._traverse_part(x) for x in objects]
            return self._maker(value, skeleton, parts, [source_of(x).kind if is_proxy(x) else type(x) for x in objects])
        except Exception:  # of the __copy__ or __setattr__ of a user's class: distributed would wait for ever
            # as text: a log handler that keeps records would keep the frames, with the arrays and proxies in them
            logger.warning("the arrays in a %s stay up, since: %s", type(value), traceback.format_exc())
            return self._maker(value, value, ())

    def _maker(
        self, value: Any, skeleton: Any, parts: Sequence[Locate], kinds: Sequence[type] = ()
    ) -> Callable[[Todo], Entry]:
        """Return the function that makes the entry of a value, or of ABSENT if it came from a peer."""
        if type(skeleton) is Slot:
            return partial(self._entry_of, value, NO_SKELETON, parts, False)
        # Methods give an object's arrays to compiled code, which takes no proxies. So the arrays come up with the
        # object.
        lazy = self._lazily and bool(kinds) and is_data(skeleton) and UNPROXIED.isdisjoint(map(library_of, kinds))
        return partial(self._entry_of, value, SkeletonUnit(skeleton, size_of(skeleton)), parts, lazy)

    def _entry_of(self, value: Any, skeleton: SkeletonUnit, parts: Sequence[Locate], lazy: bool, todo: Todo) -> Entry:
        """Return the existing or new entry of a value; under the lock."""
        sizes: Sizes = []
        if (existing := self._values.get(id(value))) is not None:
            return existing
        locations = [locate(sizes) for locate in parts]
        for unit, nbytes in sizes:
            if unit.valid:
                self.executor.record(self.executor.state.grow(unit, nbytes), todo)
            else:
                unit.nbytes = nbytes
        if not locations and skeleton.nbytes < SMALL_BYTES and is_plain(skeleton.value):
            self._bundled(skeleton)
        entry = Entry(ABSENT if lazy else value, skeleton, locations, lazy)
        if entry.value is not ABSENT and (locations or skeleton.nbytes >= SMALL_BYTES):
            self._values[id(value)] = entry
        return entry

    def entry_of_owner(self, array: np.ndarray) -> Entry:
        """Return the entry of an array of numbers that is no view: a short way for most arrays. Under the lock."""
        number, nbytes = id(array), array.nbytes  # the name of the array's memory is its own id
        if nbytes < SMALL_BYTES:
            return Entry(array, self._bundled(SkeletonUnit(array, nbytes)), ())
        if (entry := self._values.get(number)) is None:
            unit, position = self._contents.get(number), 0
            if unit is not None and isinstance(unit, HostObjects):  # a view of it was stored before
                position, _ = unit.position_of(array, {number: nbytes})
            else:
                unit = self._contents[number] = HostObjects(array, number, nbytes)
            entry = self._values[number] = Entry(array, NO_SKELETON, ((unit, position),))
        return entry

    def _traverse_packed(self, packed: Packed) -> Callable[[Todo], Entry]:
        """Find the parts of a value from a peer, whose buffers stay host bytes until their first use."""
        tier_of = self.executor.tier_of
        buffers = [Buffer(d, root.nbytes, tier_of(d), (root, list(views))) for d, root, views in packed.buffers]
        hosts = [self._traverse_part(x) for x in packed.hosts]
        parts: list[Locate] = []
        for number, i, kind in packed.locations:
            if number is None:
                parts.append(hosts[i])
            else:
                buffers[number].set_kind(i, kind)
                parts.append(partial(self._locate_packed, buffers[number], i))
        return self._maker(ABSENT, packed.skeleton, parts, [kind for _, _, kind in packed.locations])

    def _traverse_part(self, x: Any) -> Locate:
        if self._lazily and is_proxy(x):
            source = source_of(x)
            if isinstance(source, StoredObject) and source.reader is self:
                return lambda _: (source.unit, source.index)
            x = unproxy(x)  # a proxy of another store: its object comes up
        is_left = is_left_to_cudf(x)
        if not is_left and is_device_array(x):
            device = device_of(x)
            assert device is not None
            name, nbytes = device.buffer_of(x)
            return partial(self._locate_on_device, x, device, self.executor.tier_of(device), (id(device), name), nbytes)
        if not is_left and (held := held_by(x)):
            return partial(self._locate_in_host, x, held)
        # a unit by itself, and in no index: only cuDF counts and moves it, or the peer took it for a part
        alone = SkeletonUnit(x, 0 if is_left else size_of(x))
        alone.fixed = is_left
        alone.set_kind(0, type(x))
        return lambda _: (alone, 0)

    def _bundled(self, content: _Content) -> _Content:
        """Put a new content into a bundle, if it is small; return the content."""
        if content.nbytes < SMALL_BYTES:
            key = content.top, content.at
            bundle = self._open.get(key)
            if bundle is None or not bundle.is_open:
                bundle = self._open[key] = (Values if type(content) is SkeletonUnit else Buffers)(*key)
            content.bundle, bundle.members[content] = bundle, None
        return content

    def _locate_packed(self, buffer: Buffer, position: int, _: Sizes) -> Location:
        return buffer if buffer.bundle else self._bundled(buffer), position

    def _locate_in_host(self, x: Any, held: Held, sizes: Sizes) -> Location:
        unit = self._contents.get(name_of(held))
        if isinstance(unit, HostObjects):
            position, is_new = unit.position_of(x, held)
            if is_new:
                sizes.append((unit, unit.measured()))
        else:
            unit, position = HostObjects(x, name_of(held), sum(held.values()), held), 0
        for name in unit.names:
            self._contents[name] = unit
        return unit, position

    def _locate_on_device(
        self, array: Any, device: Device, tier: int, name: Hashable, nbytes: int, sizes: Sizes
    ) -> Location:
        unit = self._contents.get(name)
        if isinstance(unit, Buffer):
            position, is_new = unit.position_of(array)
            if is_new:
                sizes.append((unit.unit, unit.unit.nbytes))
        else:
            unit = self._contents[name] = Buffer(device, nbytes, tier)
            unit.names = (name,)
            position, _ = unit.position_of(array)
            if always_moves(type(array)):
                self._bundled(unit)
        unit.set_kind(position, type(array))
        return unit, position

    # --- values of entries --------------------------------------------------------------------------------------------
    def restore(self, entry: Entry, *, writes: bool = False) -> Any:
        """Bring up the value of an entry that has a name, and return it; SpillError if it cannot be read back."""
        with self.executor.needing(entry.used_units, writes=writes):  # a pin keeps no members of a bundle, nor parts
            if (value := entry.value) is not ABSENT:
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
                self._values[id(value)] = entry  # in case it is stored under another key
            return value

    def packed(self, entry: Entry) -> Packed:
        """Return the value of an entry as host bytes, without copies to the device; raises as :meth:`restore`."""
        disk = self.executor.disk
        with self.executor.needing(entry.units, for_peer=True):
            contents = each_once(entry.locations)
            buffers: list[Any] = [c for c in contents if isinstance(c, Buffer) and not any(map(is_immovable, c.arrays))]
            hosts = [at for at in dict.fromkeys(entry.locations) if at[0] not in buffers]
            locations = tuple(
                (None, hosts.index((u, i)), u.kind_of(i)) if (u, i) in hosts else (buffers.index(u), i, u.kind_of(i))
                for u, i in entry.locations
            )
            roots = tuple((b.device, *b.packed(disk)) for b in buffers)
            return Packed(entry.skeleton.value, locations, roots, tuple(u.object_at(i) for u, i in hosts))

    def _part(self, unit: ObjectContent, index: int) -> StoredObject:
        """Return the stored object of a proxy: the existing one, or a new one."""
        todo = Todo()
        with self.lock:
            objects = unit.stored_objects = {} if unit.stored_objects is None else unit.stored_objects
            part = objects[index]() if index in objects else None
            if part is None:
                entry = Entry(ABSENT, NO_SKELETON, ((unit, index),))
                self.executor.record(self.executor.name(entry), todo)
                part = StoredObject(self, entry)
                objects[index] = weakref.ref(part)
        self.executor.carry_out(todo)
        return part


def _is_part(x: Any) -> bool:
    return is_device_array(x) or is_left_to_cudf(x) or sum(held_by(x).values()) >= _BIG_BYTES
