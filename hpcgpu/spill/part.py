"""One object in a task's value, as its proxy knows it: where it lies, and how it comes up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpcgpu.spill.columns import UNTOLD, is_about_columns, is_frame
from hpcgpu.spill.unit import Unit

if TYPE_CHECKING:
    from hpcgpu.spill.keeper import Keeper


class Part:
    """A device array, or a big object in host memory, inside a stored value.

    Attributes
    ----------
    kind : type
        Of the object.
    nbytes : int
        Of the object's unit.

    """

    __slots__ = ("__weakref__", "_proxy", "index", "keeper", "kind", "nbytes", "unit")

    def __init__(self, keeper: Keeper, unit: Unit, index: int, kind: type, nbytes: int) -> None:
        self.keeper, self.unit, self.index, self.kind, self.nbytes = keeper, unit, index, kind, nbytes
        self._proxy: Any = None

    def proxy(self) -> Any:  # noqa: ANN401
        """Return the object's proxy: the one that lives, or a new one; under the store's lock."""
        from hpcgpu.spill.proxy import make_proxy

        found = self._proxy() if self._proxy is not None else None
        if found is None:
            found = make_proxy(self)
            self._proxy = weakref.ref(found)
        return found

    def let_go(self) -> None:
        """The object is moved down: the proxy, if there is one, gives it up."""
        from hpcgpu.spill.proxy import let_go

        if self._proxy is not None and (found := self._proxy()) is not None:
            let_go(found)

    def up(self) -> Any:  # noqa: ANN401
        """Return the object, bringing it up; raises SpillError as the store does."""
        with self.using() as value:
            return value

    @contextmanager
    def using(self) -> Iterator[Any]:
        """Keep the object where it can be used."""
        with self.keeper.keeping_up(self.unit):
            yield self.unit.object_at(self.index)

    def answer(self, operation: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        """Return what an operation on the object returns, if that can be told without bringing it up, else UNTOLD."""
        if is_frame(self.kind) and is_about_columns(self.kind, operation, *args):
            return self.keeper.answer(self.unit, self.index, operation, *args)
        return UNTOLD

    def dirty(self) -> None:
        """The object was written to: no copy of it is worth anything."""
        self.unit.volatile = True
