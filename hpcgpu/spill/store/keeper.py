"""Reads values: brings up what is below in the thread that asks, and keeps it up while it is used."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcgpu.spill.devices.arrays import is_immovable
from hpcgpu.spill.proxies import dask as proxy_dask
from hpcgpu.spill.proxies.part import Part
from hpcgpu.spill.store.catalog import Catalog
from hpcgpu.spill.store.executor import Executor, Todo
from hpcgpu.spill.store.handle import Handle, Packed
from hpcgpu.spill.values.buffer import Buffer
from hpcgpu.spill.values.entry import ABSENT, Entry
from hpcgpu.spill.values.unit import Content, each_once
from hpcgpu.spill.values.value import put_together


class Keeper:
    """What handles and proxies reach a store by.

    Thread-safe; GpuSpillBuffer makes it. :meth:`handle` is called under the store's lock, the rest without, in threads
    that may wait for copies: those of tasks and clients.

    Parameters
    ----------
    executor : Executor
        The store's.
    lazily : bool
        Parts of values come up one by one (jit_unspill).

    Attributes
    ----------
    lock : Lock
        The store's.
    orphans : deque
        Takes what handles and proxies have named when they go.

    """

    def __init__(self, executor: Executor, lazily: bool) -> None:
        if lazily:
            proxy_dask.register()
        self._executor = executor
        self.lock, self.orphans = executor.lock, executor.orphans
        self.catalog = Catalog(executor.known, executor.values, executor.place_of, self, lazily)

    def restore(self, entry: Entry) -> Any:  # noqa: ANN401
        """Return the value of an entry that has a name, bringing up what is below; raises as :meth:`keeping_up`."""
        with self._executor.needing(entry.used_units):
            return self.assembled(entry)

    def assembled(self, entry: Entry) -> Any:  # noqa: ANN401
        """Return the value of an entry whose used units are up, and stay so."""
        value = entry.value
        if value is not ABSENT:
            return value
        if entry.lazy:
            parts = [self._part(unit, i).proxy() for unit, i in entry.places]
        else:
            parts = [unit.object_at(i) for unit, i in entry.places]
        value = put_together(entry.rest.value, parts)
        with self.lock:
            if entry.value is not ABSENT:  # another thread was faster: all get one value
                return entry.value
            if entry.names:
                entry.value = value
                self.catalog.note(entry)
        return value

    @contextmanager
    def keeping_up(self, unit: Content) -> Iterator[None]:
        """Keep a part of a value where it can be used, for its proxy.

        Raises
        ------
        SpillError
            It cannot be read back.

        """
        with self._executor.needing((unit.unit,)):
            yield

    def written(self, unit: Content) -> None:
        """Note that a unit, which is kept up, was written to."""
        self._executor.tell(self._executor.state.used, (unit.unit,), True)

    def packed(self, entry: Entry) -> Packed:
        """Return the value of an entry as host bytes; nothing goes through the device; raises as :meth:`keeping_up`."""
        disk = self._executor.disk
        with self._executor.needing(entry.units, for_peer=True):
            buffers = [unit for unit in each_once(entry.places) if _is_packable(unit)]
            hosts = [place for place in dict.fromkeys(entry.places) if place[0] not in buffers]
            places = tuple(
                (None, hosts.index((u, i)), u.kind_of(i)) if (u, i) in hosts else (buffers.index(u), i, u.kind_of(i))
                for u, i in entry.places
            )
            roots = tuple((b.device, *b.packed(disk)) for b in buffers if isinstance(b, Buffer))
            return Packed(entry.rest.value, places, roots, tuple(u.object_at(i) for u, i in hosts))

    def handle(self, entry: Entry, to_worker: bool, todo: Todo) -> Handle:
        """Return a handle of an entry; under the lock."""
        self._executor.note(self._executor.name(entry), todo)
        return Handle(self, entry, to_worker)

    def _part(self, unit: Content, index: int) -> Part:
        """Return the part that a proxy stands for: the one that is there, or a new one."""
        made = Part(self, unit, index)
        todo = Todo()
        with self.lock:
            parts = unit.parts = {} if unit.parts is None else unit.parts
            known = parts[index]() if index in parts else None
            if known is None:
                parts[index] = weakref.ref(made)
                if unit.bundle is not None:
                    self._executor.state.join(unit.bundle, unit)
                self._executor.note(self._executor.state.set(made.token, (unit.unit,)), todo)
        self._executor.carry_out(todo)
        return known if isinstance(known, Part) else made


def _is_packable(unit: Content) -> bool:
    return isinstance(unit, Buffer) and not any(map(is_immovable, unit.arrays))
