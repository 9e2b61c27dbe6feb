"""One object in a task's value, as its proxy sees it: where it lies, and how it comes up."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from hpcgpu.spill.proxies.proxy import make_proxy, release
from hpcgpu.spill.values.unit import ObjectContent


class UnitReader(Protocol):
    """Keeps units up; :class:`hpcgpu.spill.store.reader.Reader` does. Thread-safe."""

    @property
    def lock(self) -> Any:
        """The store's."""

    @property
    def orphans(self) -> deque[Any]:
        """Takes the tokens of stored objects that go."""

    def keeping_up(self, unit: ObjectContent) -> AbstractContextManager[None]:
        """Keep a unit up while inside."""

    def written(self, unit: ObjectContent) -> None:
        """A unit was written to."""


class Token:
    """The name that a stored object gives its content: it outlives the stored object. Immutable."""

    __slots__ = ("content",)

    def __init__(self, content: ObjectContent) -> None:
        self.content = content


class StoredObject:
    """A device array, or a big object in host memory, inside a stored value.

    It is a name of its unit: the object lives as long as it has a proxy, whatever becomes of the keys.

    Thread-safe. The store makes it when it traverses a value; proxies call it in the threads of tasks, and the store
    (:meth:`release`) in the thread that moves the object down.
    """

    __slots__ = ("__weakref__", "_proxy", "index", "kind", "nbytes", "reader", "token", "unit")

    def __init__(self, reader: UnitReader, unit: ObjectContent, index: int) -> None:
        self.reader, self.unit, self.index = reader, unit, index
        self.kind, self.nbytes = unit.kind_of(index), unit.nbytes
        self.token = Token(unit)
        self._proxy: Any = None

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self.reader.orphans.append(self.token)

    def proxy(self) -> Any:
        """Return the object's proxy: the living one, or a new one."""
        made = None
        while True:
            with self.reader.lock:
                found = self._proxy() if self._proxy is not None else None
                if found is None and made is not None:
                    self._proxy, found = weakref.ref(made), made
            if found is not None:
                return found
            made = make_proxy(self)

    def release(self) -> None:
        """Take the object from its proxy, if there is one, since the object moves down."""
        if self._proxy is not None and (found := self._proxy()) is not None:
            release(found)

    def length(self) -> int | None:
        """Return the object's ``len``, if a copy below tells; nothing is loaded."""
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
        """The object was written to: copies of it are worth nothing."""
        self.reader.written(self.unit)
