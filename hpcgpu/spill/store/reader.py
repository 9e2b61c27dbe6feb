"""Reads values: brings up the units that are below, in the calling thread, and keeps them up while they are in use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcgpu.spill.devices.cuda import is_immovable
from hpcgpu.spill.proxies import dask as proxy_dask
from hpcgpu.spill.proxies.dask import StoredObject
from hpcgpu.spill.store import Handle, Packed
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.identity_map import IdentityMap
from hpcgpu.spill.store.inbox import Todo
from hpcgpu.spill.values.bundle import Buffer
from hpcgpu.spill.values.traverse import put_together
from hpcgpu.spill.values.unit import ABSENT, Entry, ObjectContent, each_once


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
