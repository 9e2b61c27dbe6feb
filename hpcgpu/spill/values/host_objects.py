"""Objects in host memory: the memory that each keeps, and the unit that moves to disk, objects in the same allocations.

A view keeps all of its allocation alive. Sizes of values are dask's.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcgpu.spill.state.instructions import DISK, HOST
from hpcgpu.spill.storage.disk import Disk, ImmovableError, Pickled
from hpcgpu.spill.values.unit import NUMBERS, ObjectContent

logger = logging.getLogger("distributed.worker.memory")
_UNKNOWN_BYTES = 1_000_000  # about what distributed takes when a sizeof fails (sizeof.py, 2026.8.0)
# attributes of pandas' own columns: of dates and categories, and of numbers that may be missing
_ARRAYS = ("_ndarray", "_data", "_mask")
_TABLES = {"DataFrame": "pandas", "Series": "pandas", "Table": "pyarrow"}
# The host memory that an object keeps, in bytes: by an id that is valid while the allocation lives, for an allocation
# that views share; by the negative of the object's own id, for memory of the object alone.
Held = dict[int, int]
Name = int | frozenset[int]


def held_by(x: Any) -> Held:
    """Return the host memory that an array of numbers or a table keeps; an empty dict for another object."""
    kind: type = type(x)
    if kind is np.ndarray:
        if x.dtype.hasobject:
            return {}
        return {id(x): x.nbytes} if x.base is None else dict([owner_of(x)])
    family = _family(kind)
    if family == "pyarrow":
        return dict(_arrow(chunk for column in x.columns for chunk in column.chunks)) or {-id(x): 0}
    return _held_by_frame(x) if family else {}


@functools.lru_cache(256)
def _family(kind: type) -> str:
    """Return the library of a class of tables; "" for another class."""
    family = kind.__module__.partition(".")[0]
    return family if _TABLES.get(kind.__name__) == family else ""


def name_of(held: Held) -> Name:
    """Return the name that objects of the same allocations share: nearly always the id of one allocation."""
    owners = held if len(held) == 1 else [owner for owner in held if owner > 0]
    return next(iter(owners)) if len(owners) == 1 else frozenset(owners)


def _answers(x: Any) -> dict[str, Any]:
    """Return what a proxy of an object on disk answers without it."""
    kind: type = type(x)
    answers = {"len": shape[0]} if (shape := getattr(x, "shape", ())) else {}
    return {**answers, "name": x.name} if kind.__name__ == "Series" and _family(kind) else answers


def is_owner(x: Any) -> bool:
    """Tell whether an object is an array of numbers in host memory that owns its memory."""
    return type(x) is np.ndarray and x.base is None and not x.dtype.hasobject


def owner_of(array: np.ndarray) -> tuple[int, int]:
    """Return an id of the array's allocation, valid while it lives, and its bytes."""
    while True:
        base: Any = array.base
        if type(base) is memoryview:  # it came from a peer, and lies in the memory of the message
            base = base.obj
        if base is None:
            return id(array), array.nbytes
        if not isinstance(base, np.ndarray):
            # the owner is no array: take its length if it is bytes, else the bytes of the last array
            return id(base), len(base) if isinstance(base, (bytes, bytearray)) else array.nbytes
        array = base


def _held_by_frame(frame: Any) -> Held:
    """Return the host memory that a data frame or series of pandas keeps."""
    owners: dict[int, int] = {}
    more_bytes, objects = int(frame.index.nbytes), False
    # _mgr.blocks is not public (in pandas since 1.1, read in 3.1.1), but the only way to the columns' memory without an
    # array for each column; a shuffle gives a thousand small frames, which are views of one
    for block in frame._mgr.blocks:
        values = block.values
        arrays = [values] if type(values) is np.ndarray else [getattr(values, name, None) for name in _ARRAYS]
        arrays = [array for array in arrays if type(array) is np.ndarray]
        if (chunks := getattr(values, "_pa_array", None)) is not None:
            owners.update(_arrow(chunks.chunks))
        elif arrays:
            owners.update(map(owner_of, arrays))
            objects |= any(array.dtype.hasobject for array in arrays)
        else:
            more_bytes += int(values.nbytes)
    if objects:  # dask estimates the objects of a column
        more_bytes = max(more_bytes, size_of(frame) - sum(b.values.nbytes for b in frame._mgr.blocks))
    return owners | {-id(frame): more_bytes}


def _arrow(chunks: Any) -> Iterator[tuple[int, int]]:
    return ((b.address, b.size) for chunk in chunks for b in chunk.buffers() if b is not None)


@functools.cache
def _sizeof() -> Callable[[Any], int]:
    from dask.sizeof import sizeof

    return sizeof


def size_of(value: Any) -> int:
    """Return the size of a value by dask's ``sizeof``, which is imported with the first value; it does not raise."""
    try:
        return int(_sizeof()(value))
    except Exception:  # of a user's sizeof; distributed catches all, too
        # as text: a log handler that keeps records would keep the frames, with the value in them
        why = traceback.format_exc()
        logger.warning("the size of a %s is taken for %d bytes: %s", type(value), _UNKNOWN_BYTES, why)
        return _UNKNOWN_BYTES


class HostObjects(ObjectContent):
    """Arrays or tables in host memory that are views of the same memory: one occupies as much as all.

    On disk each has bytes of its own; bytes inside another view's are written once. An object without keys is kept in
    memory by the others, and is not written. Arrays are of any shapes, strides and dtypes but object; ``nbytes`` counts
    their allocations, not the part that they show.
    """

    usual_kind = np.ndarray
    # made for the second object, or for the second allocation: most units have one
    _positions: dict[int, int] | None = None
    _held: Held | None = None
    _answers: Sequence[Mapping[str, Any]] = ()  # of the objects on disk

    def __init__(self, x: Any, name: Name, nbytes: int, held: Held | None = None) -> None:
        super().__init__(next(NUMBERS), nbytes, HOST, HOST)
        if held and len(held) > 1:
            self._held = dict(held)
        self.objects = [x]
        self.names = (name,)
        if type(x) is not np.ndarray:
            self.set_kind(0, type(x))

    def position_of(self, x: Any, held: Held) -> tuple[int, bool]:
        """Return the position of an object, and whether the object is new, so that it has no copy."""
        if self.objects and self.objects[0] is x:
            return 0, False
        position = self._positions.get(id(x)) if self._positions else None
        return (self._append(x, held), True) if position is None else (position, False)

    def object_at(self, index: int) -> Any:
        return self.objects[index]

    def answers_of(self, index: int) -> Mapping[str, Any]:
        return self._answers[index] if self.on_disk is not None and index < len(self._answers) else {}

    def measured(self) -> int:
        """Return the bytes of the allocations."""
        return self.nbytes if self._held is None else sum(self._held.values())

    def take_up(self, tier: int) -> Any:
        objects, self.objects = self.objects, []
        if self._positions or self._held:  # most objects have neither, and these would be their first
            self._positions = self._held = None
        return objects

    def put_up(self, tier: int, data: Any) -> None:
        self.names = ()
        for x, held in zip(*data, strict=True):
            if x is None:
                self.objects.append(None)
            else:
                self._append(x, held)

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        if to != DISK:
            objects = self.on_disk.read(disk)
            return objects, [{} if x is None else held_by(x) for x in objects]  # None: it has no name
        named = {i for entry in tuple(self.entries) for unit, i in entry.locations if unit is self}
        kept = [x if i in named else None for i, x in enumerate(tuple(self.objects))]
        self._answers = [_answers(x) for x in kept]
        try:
            return Pickled.write(disk, kept)
        except ImmovableError as e:
            raise ImmovableError(next(x for x in kept if x is not None), e) from e.__cause__

    @staticmethod
    def bytes_up(data: Any) -> int:
        """Return the size of objects that came back up: each has bytes of its own now."""
        return sum({name: nbytes for held in data[1] for name, nbytes in held.items()}.values())

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
