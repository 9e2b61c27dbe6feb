"""One stored value: its parts, and how often it is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcgpu.spill.unit import Buffer, Rest, Unit
from hpcgpu.spill.value import put_together

ABSENT = object()


class Entry:
    """A value under one or more keys.

    Attributes
    ----------
    value : object
        The value itself while all its parts are up, else ABSENT.
    places : list of (Buffer, int)
        For each slot of the rest, the buffer and the array's position in it.
    keys : int
        How many keys name it.

    """

    __slots__ = ("__weakref__", "keys", "places", "rest", "value")

    def __init__(self, value: Any, rest: Rest, places: list[tuple[Buffer, int]]) -> None:  # noqa: ANN401
        self.value, self.rest, self.places = value, rest, places
        self.keys = 0

    def units(self) -> Iterator[Unit]:
        """Yield the parts, each once."""
        yield self.rest
        yield from dict.fromkeys(buffer for buffer, _ in self.places)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, wherever they are."""
        return sum(u.nbytes for u in self.units())

    def assemble(self) -> Any:  # noqa: ANN401
        """Return the value from its parts, which are up."""
        return put_together(self.rest.value, [buffer.arrays[i] for buffer, i in self.places])
