"""One object in a task's value, as its proxy knows it: where it lies, and how it comes up."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from hpcgpu.spill.proxies.proxy import let_go, make_proxy
from hpcgpu.spill.values.unit import Content


class Keeps(Protocol):
    """What keeps units up; :class:`hpcgpu.spill.store.keeper.Keeper` does. Thread-safe."""

    @property
    def lock(self) -> Any:  # noqa: ANN401
        """The store's."""

    @property
    def orphans(self) -> deque[Any]:
        """Takes the tokens of parts that are gone."""

    def keeping_up(self, unit: Content) -> AbstractContextManager[None]:
        """Keep a unit where it can be used while inside."""

    def written(self, unit: Content) -> None:
        """Note that a unit was written to."""


class Token:
    """What names a content for a part: it outlives the part."""

    __slots__ = ("content",)

    def __init__(self, content: Content) -> None:
        self.content = content


class Part:
    """A device array, or a big object in host memory, inside a stored value.

    It is a name of its unit: the object is there as long as a proxy stands for it, whatever becomes of the keys.

    Thread-safe. The store makes it when it walks a value; proxies call it in the threads of tasks, and the store
    (:meth:`let_go`) in the thread that moves the object down.

    Attributes
    ----------
    kind : type
        Of the object.
    nbytes : int
        Of the object's unit.

    """

    __slots__ = ("__weakref__", "_proxy", "index", "keeper", "kind", "nbytes", "token", "unit")

    def __init__(self, keeper: Keeps, unit: Content, index: int) -> None:
        self.keeper, self.unit, self.index = keeper, unit, index
        self.kind, self.nbytes = unit.kind_of(index), unit.nbytes
        self.token = Token(unit)
        self._proxy: Any = None

    def __del__(self) -> None:
        # no lock here: the garbage collector may run this in a thread that holds it
        self.keeper.orphans.append(self.token)

    def proxy(self) -> Any:  # noqa: ANN401
        """Return the object's proxy: the one that lives, or a new one."""
        made = None
        while True:
            with self.keeper.lock:
                found = self._proxy() if self._proxy is not None else None
                if found is None and made is not None:
                    self._proxy, found = weakref.ref(made), made
            if found is not None:
                return found
            made = make_proxy(self)

    def let_go(self) -> None:
        """The object is moved down: the proxy, if there is one, gives it up."""
        if self._proxy is not None and (found := self._proxy()) is not None:
            let_go(found)

    def length(self) -> int | None:
        """Return what ``len`` says of the object, if a copy below tells; nothing is loaded."""
        return self.unit.length_of(self.index)

    def up(self) -> Any:  # noqa: ANN401
        """Return the object, bringing it up; raises SpillError as the store does."""
        with self.using() as value:
            return value

    @contextmanager
    def using(self) -> Iterator[Any]:
        """Keep the object where it can be used."""
        with self.keeper.keeping_up(self.unit):
            yield self.unit.object_at(self.index)

    def dirty(self) -> None:
        """The object was written to: no copy of it is worth anything."""
        self.keeper.written(self.unit)
