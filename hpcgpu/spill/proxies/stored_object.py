"""One object in a task's value, as its proxy sees it: its unit, and the way to bring it up."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpcgpu.spill.proxies.proxy import make_proxy, release
from hpcgpu.spill.values.unit import ObjectContent


class Token:
    """The name that a stored object gives its content. It outlives the stored object."""

    __slots__ = ("content",)

    def __init__(self, content: ObjectContent) -> None:
        self.content = content


class StoredObject:
    """A device array, or a big object in host memory, inside a stored value: it lives as long as it has a proxy."""

    # Thread-safe: proxies call it in the threads of tasks, and the store (release) in the thread that moves the object
    # down.

    __slots__ = ("__weakref__", "_proxy", "index", "kind", "nbytes", "reader", "token", "unit")

    def __init__(self, reader: Any, unit: ObjectContent, index: int) -> None:
        self.reader, self.unit, self.index = reader, unit, index  # a hpcgpu.spill.store.reader.Reader
        self.kind, self.nbytes = unit.kind_of(index), unit.nbytes
        self.token = Token(unit)
        self._proxy: Any = None

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self.reader.orphans.append(self.token)

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
            release(proxy)

    def length(self) -> int | None:
        """Return the object's ``len`` from a copy below, without loading; None without such a copy."""
        return self.unit.length_of(self.index)

    def up(self) -> Any:
        """Bring the object up, and return it; raises SpillError as the store does."""
        with self.using() as value:
            return value

    @contextmanager
    def using(self) -> Iterator[Any]:
        """Keep the object up while inside, and return it."""
        with self.reader.keeping_up(self.unit):
            yield self.unit.object_at(self.index)

    def dirty(self) -> None:
        """Record that the object was written to, so that copies of it do not count."""
        self.reader.written(self.unit)
