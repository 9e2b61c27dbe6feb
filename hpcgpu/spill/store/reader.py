"""Reads values: brings up what is below, in the calling thread, and keeps it up while it is in use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcgpu.spill.devices.lookup import is_immovable
from hpcgpu.spill.proxies import dask as proxy_dask
from hpcgpu.spill.proxies.stored_object import StoredObject
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.identity_map import IdentityMap
from hpcgpu.spill.store.todo import Todo
from hpcgpu.spill.store.transfer import Handle, Packed
from hpcgpu.spill.values.buffer import Buffer
from hpcgpu.spill.values.entry import ABSENT, Entry
from hpcgpu.spill.values.traverse import put_together
from hpcgpu.spill.values.unit import ObjectContent, each_once


class Reader:
    """The store, as handles and proxies see it.

    Thread-safe; GpuSpillBuffer makes it. :meth:`handle` is called under the store's lock, the other methods without it,
    in threads that may wait for copies: those of tasks and clients.
    """

    def __init__(self, executor: Executor, lazily: bool) -> None:
        if lazily:  # parts of values come up one by one (jit_unspill)
            proxy_dask.register()
        self._executor = executor
        self.lock, self.orphans = executor.lock, executor.orphans
        self.identity_map = IdentityMap(executor.known, executor.values, executor.tier_of, self, lazily)

    def read(self, entry: Entry, todo: Todo) -> Any:
        """Bring up a value for code that may write to it, and take the name that the entry has for the time of it."""
        try:
            self._executor.carry_out(todo)
            return self.restore(entry, writes=True)
        finally:
            todo = Todo()
            with self.lock:
                self._executor.unname(entry, todo)
            self._executor.carry_out(todo)

    def restore(self, entry: Entry, *, writes: bool = False) -> Any:
        """Bring up the value of an entry that has a name, and return it; raises as :meth:`keeping_up`.

        A pin of the units is not enough: without a name the members of a bundle go, and so do the parts of a value that
        comes up by parts, which nobody pins.
        """
        with self._executor.needing(entry.used_units, writes=writes):
            return self._assembled(entry)

    def _assembled(self, entry: Entry) -> Any:
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
            if entry.value is not ABSENT:  # another thread was faster: all readers get one value
                return entry.value
            entry.value = value
            self.identity_map.index(entry)
        return value

    @contextmanager
    def keeping_up(self, unit: ObjectContent) -> Iterator[None]:
        """Keep a part of a value up, for its proxy; SpillError if it cannot be read back."""
        with self._executor.needing((unit.unit,)):
            yield

    def written(self, unit: ObjectContent) -> None:
        """A unit, which is kept up, was written to."""
        self._executor.tell(self._executor.state.used, (unit.unit,), True)

    def packed(self, entry: Entry) -> Packed:
        """Return the value of an entry as host bytes; nothing goes through the device; raises as :meth:`keeping_up`."""
        disk = self._executor.disk
        with self._executor.needing(entry.units, for_peer=True):
            buffers = [unit for unit in each_once(entry.locations) if _is_packable(unit)]
            hosts = [at for at in dict.fromkeys(entry.locations) if at[0] not in buffers]
            locations = tuple(
                (None, hosts.index((u, i)), u.kind_of(i)) if (u, i) in hosts else (buffers.index(u), i, u.kind_of(i))
                for u, i in entry.locations
            )
            roots = tuple((b.device, *b.packed(disk)) for b in buffers if isinstance(b, Buffer))
            return Packed(entry.skeleton.value, locations, roots, tuple(u.object_at(i) for u, i in hosts))

    def handle(self, entry: Entry, todo: Todo) -> Handle:
        """Return a handle of an entry; under the lock."""
        self._executor.record(self._executor.name(entry), todo)
        return Handle(self, entry)

    def _part(self, unit: ObjectContent, index: int) -> StoredObject:
        """Return the stored object of a proxy: the living one, or a new one."""
        made = StoredObject(self, unit, index)
        todo = Todo()
        with self.lock:
            objects = unit.stored_objects = {} if unit.stored_objects is None else unit.stored_objects
            known = objects[index]() if index in objects else None
            if known is None:
                objects[index] = weakref.ref(made)
                if unit.bundle is not None:
                    self._executor.state.join(unit.bundle, unit)
                self._executor.record(self._executor.state.set(made.token, (unit.unit,)), todo)
        self._executor.carry_out(todo)
        return known if isinstance(known, StoredObject) else made


def _is_packable(unit: ObjectContent) -> bool:
    return isinstance(unit, Buffer) and not any(map(is_immovable, unit.arrays))
