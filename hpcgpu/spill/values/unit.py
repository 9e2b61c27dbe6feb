"""The units that move between tiers, and each tier's form of them: device buffers, and values in host memory.

The state machine decides where a unit is. This module says what that means for the unit's bytes. :meth:`Content.take`
and :meth:`Content.put` run under the store's lock and only change references; :meth:`Content.copied` does the work,
without the lock.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

from hpcgpu.spill.state.units import DISK, HOST, Unit
from hpcgpu.spill.storage.disk import Disk, Stored
from hpcgpu.spill.values import serialization

_NUMBERS = itertools.count()
_FEW = 8


class Whole(Protocol):
    """A value that units are parts of; :class:`hpcgpu.spill.values.entry.Entry` is one.

    ``value`` and ``key`` change under the store's lock; the other attributes never change.
    """

    value: Any
    locations: Sequence[tuple[ObjectContent, int]]
    lazy: bool
    key: Any

    @property
    def skeleton(self) -> Content:
        """The value without its parts."""


class ProxiedObject(Protocol):
    """An object of a unit, with its proxies; :class:`hpcgpu.spill.proxies.stored_object.StoredObject` is one.

    Thread-safe. Executor calls :meth:`release`, without the store's lock, in the thread that carries the drop out.
    """

    index: int

    def release(self) -> None:
        """Take the object from its proxy, since the object moves down."""


class Content(Unit, ABC):
    """A unit, and what each tier holds of it.

    IdentityMap, Executor and Reader change it under the store's lock, also by :meth:`join`, :meth:`leave`,
    :meth:`take` and :meth:`put`. :meth:`copied` runs without the lock, in the thread that copies. Readers look at a
    content without the lock.

    Attributes
    ----------
    entries : collection of Whole
        The values that it is a part of, if something names them.

    """

    # Set where they change: a unit is made for every value, and with its containers a million of them would cost the
    # garbage collector seconds.
    entries: tuple[Whole, ...] | dict[Whole, None] = ()

    def __init__(self, nbytes: int, top: int, at: int) -> None:
        # as Unit's own does it: one is made for every value
        self.name, self.nbytes, self.top, self.at = next(_NUMBERS), nbytes, top, at

    @property
    @abstractmethod
    def contents(self) -> tuple[ObjectContent, ...]:
        """The objects that move with it: itself, or the members of a bundle."""

    def join(self, entry: Whole) -> None:
        """Become a part of one more value that has a name."""
        if not self.entries:
            self.entries = (entry,)
        elif isinstance(self.entries, dict):
            self.entries[entry] = None
        elif len(self.entries) < _FEW:
            self.entries += (entry,)
        else:  # many views of one array
            self.entries = dict.fromkeys((*self.entries, entry))

    def leave(self, entry: Whole) -> None:
        """Cease to be a part of a value that has lost its last name."""
        if len(self.entries) == 1:
            self.entries = ()
        elif isinstance(self.entries, dict):
            del self.entries[entry]
        else:
            self.entries = tuple(e for e in self.entries if e is not entry)

    @abstractmethod
    def take(self, tier: int) -> Any:
        """Give up what a tier holds, and return it: the memory is free when the last reference goes."""

    @abstractmethod
    def put(self, tier: int, data: Any) -> None:
        """Let a tier hold what :meth:`copied` has returned."""

    @abstractmethod
    def copied(self, source: int, to: int, disk: Disk) -> Any:
        """Return a copy for another tier; the source keeps its own. Raises whatever disk, device or pickle raise."""

    @staticmethod
    def stored(data: Any) -> Stored:
        """Return what a copy on disk has there."""
        found: Stored = data[0]
        return found

    @staticmethod
    def bytes_up(data: Any) -> int:
        """Return the size in host memory of a copy from disk, if it may differ from before; else 0."""
        del data
        return 0


class ObjectContent(Content):
    """A content that has objects of users; a unit, or a small member of a unit, the bundle, which it moves with.

    Threads as of :class:`Content`.

    Attributes
    ----------
    bundle : Bundle or None
        The bundle is the unit, and has its state. Of a member only ``nbytes``, ``top`` and ``keys`` mean anything;
        ``keys`` counts the values and proxies that it is a part of.
    names : tuple of hashable
        Of the allocations that it lies in where it is used, as long as it is there.
    kinds : dict of int to type, or None
        The types of its objects that are not of the usual type.
    stored_objects : dict of int to reference to ProxiedObject, or None
        Those of its objects that have proxies (jit_unspill).

    """

    usual_kind: type = object

    bundle: Any = None
    names: tuple[Hashable, ...] = ()
    kinds: dict[int, type] | None = None
    stored_objects: dict[int, weakref.ref[ProxiedObject]] | None = None

    @property
    def unit(self) -> Content:
        """The unit that moves when this content does."""
        return self.bundle or self

    @property
    def contents(self) -> tuple[ObjectContent, ...]:
        """Itself."""
        return (self,)

    def kind_of(self, index: int) -> type:
        """Return the type of one of its objects."""
        return self.kinds.get(index, self.usual_kind) if self.kinds else self.usual_kind

    def set_kind(self, index: int, kind: type) -> None:
        """Keep the type of one of its objects."""
        if kind is not self.usual_kind:
            self.kinds = self.kinds or {}
            self.kinds[index] = kind

    def living_objects(self) -> list[ProxiedObject]:
        """Return those objects that may have proxies."""
        refs = tuple((self.stored_objects or {}).values())  # in one step: another thread may add one
        return [found for ref in refs if (found := ref()) is not None]

    @abstractmethod
    def object_at(self, index: int) -> Any:
        """Return one of its objects, while it is up."""

    def length_of(self, index: int) -> int | None:
        """Return the length of an object, as the copies below have it; None if they do not tell."""
        views = self.views()
        shape = getattr(views[index], "shape", None) if index < len(views) else None
        return shape[0] if shape else None

    def views(self) -> Sequence[Any]:
        """Return the shapes of its objects, if there is a copy below."""
        return ()


class SkeletonUnit(ObjectContent):
    """A value without its parts, in memory or pickled on disk.

    IdentityMap makes it, under the store's lock; threads as of :class:`Content`. ``nbytes`` is what dask's ``sizeof``
    says; for an array it is the array's own.
    """

    _pickled: serialization.Pickled | None = None

    def __init__(self, value: Any, nbytes: int) -> None:
        super().__init__(nbytes, HOST, HOST)
        self.value = value

    def object_at(self, index: int) -> Any:
        """Return the value."""
        del index
        return self.value

    def take(self, tier: int) -> Any:
        """Give up the value, or what is on disk."""
        data: Any
        if tier == DISK:
            data, self._pickled = self._pickled, None
        else:
            data, self.value = self.value, None
        return data

    def put(self, tier: int, data: Any) -> None:
        """Hold a copy."""
        if tier == DISK:
            self._pickled = data
        else:
            self.value = data

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        """Pickle to disk, or unpickle."""
        del source
        if to == DISK:
            return serialization.write(disk, self.value)
        assert self._pickled is not None
        return serialization.read(disk, self._pickled)


def each_once(locations: Iterable[tuple[ObjectContent, int]]) -> tuple[ObjectContent, ...]:
    """Return the units of locations, each once."""
    return tuple(dict.fromkeys(unit for unit, _ in locations))
