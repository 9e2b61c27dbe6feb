"""One stored value: its parts, and how often it is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcgpu.spill.values.unit import Content, Rest, each_once
from hpcgpu.spill.values.value import Slot

ABSENT = object()
# of a value that is an array or a table: nothing is left of it without
WHOLE = Rest(Slot(0), 0)


class Entry:
    """A value under one or more names: keys of the store, and handles that are out.

    Catalog makes it, under the store's lock. ``value``, ``names`` and ``key`` change under that lock, and may be read
    without; the rest never changes.

    Attributes
    ----------
    value : object
        The value itself, once somebody stored or read it, while its used units are up; else ABSENT.
    rest : Rest
        What is left of it without its parts; WHOLE where that is nothing.
    places : sequence of (Content, int)
        For each slot of the rest, the unit and the object's position in it.
    lazy : bool
        Its parts come up one by one, at first use (jit_unspill): the value that is handed out has proxies for them.
    units : tuple of Content
        What moves, each once: the parts, or the bundles that they are in.
    small : tuple of Content
        The parts that are in bundles.
    used_units : tuple of Content
        Those that come up with the value.
    names : int
        How many keys and handles name it.
    key : hashable
        The last key, for messages.

    """

    __slots__ = ("__weakref__", "key", "lazy", "names", "places", "rest", "small", "units", "used_units", "value")

    def __init__(
        self,
        value: Any,  # noqa: ANN401
        rest: Rest,
        places: Sequence[tuple[Content, int]],
        lazy: bool = False,
    ) -> None:
        self.value, self.rest, self.places, self.lazy = value, rest, places, lazy
        self.names, self.key = 0, ABSENT
        self.units: tuple[Content, ...]
        self.small: tuple[Content, ...] = ()
        if rest is WHOLE or not places:
            only = rest if rest is not WHOLE else places[0][0]
            self.units = (only.bundle or only,)
            if only.bundle is not None:
                self.small = (only,)
        else:
            parts = rest, *each_once(places)
            self.units = tuple(dict.fromkeys(part.unit for part in parts))
            self.small = tuple(part for part in parts if part.bundle is not None)
        self.used_units = (rest,) if lazy else self.units

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, wherever they are."""
        return self.rest.nbytes + sum(part.nbytes for part in each_once(self.places))
