"""The unit that moves from host memory to disk: objects in the same allocations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices.protocols import ImmovableError
from hpcgpu.spill.state.units import DISK, HOST
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.values import serialization
from hpcgpu.spill.values.aliasing import Held, Name, held_by, name_of
from hpcgpu.spill.values.unit import ObjectContent


class _Objects(NamedTuple):
    """Objects that came back up, and the memory that each keeps; None for an object without a name."""

    objects: list[Any]
    held: list[Held]


class _Shape(NamedTuple):
    shape: tuple[int, ...]


class HostObjects(ObjectContent):
    """Arrays or tables in host memory that are views of the same memory: one occupies as much as all."""

    # On disk each has bytes of its own; bytes inside another view's are written once. An object without keys is kept in
    # memory by the others, and is not written. Arrays are of any shapes, strides and dtypes but object; ``nbytes``
    # counts their allocations, not the part that they show.

    usual_kind = np.ndarray
    # made for the second object, or for the second allocation: most units have one
    _positions: dict[int, int] | None = None
    _held: Held | None = None
    _pickled: serialization.Pickled | None = None
    _shapes: Sequence[_Shape] = ()

    def __init__(self, x: Any, name: Name, nbytes: int) -> None:
        super().__init__(nbytes, HOST, HOST)
        self.objects = [x]
        self.names = (name,)
        if type(x) is not np.ndarray:
            self.set_kind(0, type(x))

    @classmethod
    def of_held(cls, x: Any, held: Held) -> HostObjects:
        """Return a unit of an object and the memory that it keeps (:func:`hpcgpu.spill.values.aliasing.held_by`)."""
        made = cls(x, name_of(held), sum(held.values()))
        if len(held) > 1:
            made._held = dict(held)
        return made

    def position_of(self, x: Any, held: Held) -> tuple[int, bool]:
        """Return the position of an object, and whether the object is new, so that it has no copy."""
        if self.objects and self.objects[0] is x:
            return 0, False
        position = self._positions.get(id(x)) if self._positions else None
        return (self._append(x, held), True) if position is None else (position, False)

    def object_at(self, index: int) -> Any:
        """Return one of the objects."""
        return self.objects[index]

    def views(self) -> Sequence[Any]:
        """Return the shapes of the objects on disk."""
        return self._shapes if self._pickled is not None else ()

    def measured(self) -> int:
        """Return the bytes of the allocations."""
        return self.nbytes if self._held is None else sum(self._held.values())

    def take(self, tier: int) -> Any:
        """Give up the objects, or the copy on disk."""
        data: Any
        if tier == DISK:
            data, self._pickled = self._pickled, None
        else:
            data, self.objects = self.objects, []
            if self._positions or self._held:  # most objects have neither, and these would be their first
                self._positions = self._held = None
        return data

    def put(self, tier: int, data: Any) -> None:
        """Hold a copy."""
        if tier == DISK:
            self._pickled = data
            return
        self.names = ()
        for x, held in zip(*data, strict=True):
            if x is None:
                self.objects.append(None)
            else:
                self._append(x, held)

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        """Pickle to disk, or unpickle."""
        del source
        if to != DISK:
            assert self._pickled is not None
            objects = serialization.read(disk, self._pickled)
            return _Objects(objects, [{} if x is None else held_by(x) for x in objects])
        named = {i for entry in tuple(self.entries) for unit, i in entry.locations if unit is self}
        named |= {part.index for part in self.living_objects()}
        kept = [x if i in named else None for i, x in enumerate(tuple(self.objects))]
        self._shapes = [_Shape(getattr(x, "shape", ())) for x in kept]
        try:
            return serialization.write(disk, kept)
        except ImmovableError as e:
            raise ImmovableError(next(x for x in kept if x is not None), e) from e.__cause__

    @staticmethod
    def bytes_up(data: Any) -> int:
        """Return the size of objects that came back up: each has bytes of its own now."""
        return sum({name: nbytes for held in data.held for name, nbytes in held.items()}.values())

    def _append(self, x: Any, held: Held) -> int:
        """Add an object; return its position."""
        position = len(self.objects)
        self.objects.append(x)
        self.set_kind(position, type(x))
        if position:
            if self._positions is None:
                self._positions = {}
            self._positions[id(x)] = position
        if self._held is not None:
            self._held.update(held)
        elif position or len(held) > 1:  # so far each object keeps one allocation
            self._held = {name: self.nbytes for name in self.names if isinstance(name, int)} | held
        if (name := name_of(held)) not in self.names:
            self.names += (name,)
        return position
