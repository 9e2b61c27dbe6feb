"""One stored value: its parts, and how often it is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcgpu.spill.unit import Rest, Unit
from hpcgpu.spill.value import Slot, put_together

ABSENT = object()
# of a value that is an array or a table: nothing is left of it without
WHOLE = Rest(Slot(0), 0)


class Entry:
    """A value under one or more keys.

    Attributes
    ----------
    value : object
        The value itself while all its parts are up, else ABSENT.
    places : sequence of (Unit, int)
        For each slot of the rest, the unit and the object's position in it.
    lazy : bool
        Its parts come up one by one, at first use (jit_unspill): the value that is handed out has proxies for them.
    units : tuple of Unit
        The parts, each once.
    used_units : tuple of Unit
        The parts that come up with the value.
    keys : int
        How many keys name it.

    """

    __slots__ = ("__weakref__", "keys", "lazy", "places", "rest", "units", "used_units", "value")

    def __init__(self, value: Any, rest: Rest, places: Sequence[tuple[Unit, int]], lazy: bool = False) -> None:  # noqa: ANN401
        self.value, self.rest, self.places, self.lazy = value, rest, places, lazy
        self.keys = 0
        self.units: tuple[Unit, ...]
        if rest is WHOLE:
            self.units = (places[0][0],)
        else:
            self.units = (rest, *dict.fromkeys(unit for unit, _ in places)) if places else (rest,)
        self.used_units = (rest,) if lazy else self.units

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, wherever they are."""
        return sum(u.nbytes for u in self.units)

    def assemble(self) -> Any:  # noqa: ANN401
        """Return the value from its parts, which are up, or from their proxies; under the store's lock."""
        if self.lazy:
            return put_together(self.rest.value, [(unit.parts or {})[i].proxy() for unit, i in self.places])
        return put_together(self.rest.value, [unit.object_at(i) for unit, i in self.places])
