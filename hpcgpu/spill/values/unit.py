"""The units that move between tiers, with their data, and the stored values that they are parts of.

The state machine decides the tier of a unit; these classes hold and copy its data. :meth:`Content.take` and
:meth:`Content.put` run under the store's lock and only change references; :meth:`Content.copied` does the work, without
the lock.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

from hpcgpu.spill.state import DISK, HOST, Unit
from hpcgpu.spill.storage.disk import Disk, Pickled, Stored
from hpcgpu.spill.values.traverse import Slot

ABSENT = object()
_NUMBERS = itertools.count()
_FEW = 8


class ProxiedObject(Protocol):
    """An object of a unit, with its proxy: a :class:`hpcgpu.spill.proxies.dask.StoredObject`."""

    index: int

    def release(self) -> None:
        """Take the object from its proxy, without the store's lock, in the thread that carries out the drop."""


class Content(Unit, ABC):
    """A unit, and its data in each tier. Its methods but ``copied`` run under the store's lock."""

    # ``copied`` runs in the thread that copies; readers look at a content without the lock

    # The values with names that it is a part of. Containers are set only when they change: every value has a unit, and
    # with their containers a million of them would cost the garbage collector seconds.
    entries: tuple[Entry, ...] | dict[Entry, None] = ()
    on_disk: Any = None  # the stored buffers first, then what reading needs

    def __init__(self, nbytes: int, top: int, at: int) -> None:
        # not by Unit.__init__, for speed
        self.name, self.nbytes, self.top, self.at = next(_NUMBERS), nbytes, top, at

    @property
    @abstractmethod
    def contents(self) -> tuple[ObjectContent, ...]:
        """The objects that move with it: itself, or the members of a bundle."""

    def join(self, entry: Entry) -> None:
        """Become a part of one more value that has a name."""
        if isinstance(self.entries, dict):
            self.entries[entry] = None
        elif not self.entries:
            self.entries = (entry,)
        elif len(self.entries) < _FEW:
            self.entries += (entry,)
        else:  # many views of one array
            self.entries = dict.fromkeys((*self.entries, entry))

    def leave(self, entry: Entry) -> None:
        """Forget a value that has lost its last name."""
        if isinstance(self.entries, dict):
            del self.entries[entry]
        elif len(self.entries) == 1:
            self.entries = ()
        else:
            self.entries = tuple(e for e in self.entries if e is not entry)

    def take(self, tier: int) -> Any:
        """Give up the data in a tier, and return it: the memory is free when the last reference goes."""
        if tier != DISK:
            return self.take_up(tier)
        data, self.on_disk = self.on_disk, None
        return data

    def put(self, tier: int, data: Any) -> None:
        """Let a tier hold the result of :meth:`copied`."""
        if tier == DISK:
            self.on_disk = data
        else:
            self.put_up(tier, data)

    @abstractmethod
    def take_up(self, tier: int) -> Any:
        """Give up the data in a tier above the disk, and return it."""

    @abstractmethod
    def put_up(self, tier: int, data: Any) -> None:
        """Let a tier above the disk hold its data."""

    @abstractmethod
    def copied(self, source: int, to: int, disk: Disk) -> Any:
        """Return a copy for another tier; the source keeps its data. Raises the errors of disk, device and pickle."""

    @staticmethod
    def stored(data: Any) -> Stored:
        """Return the stored buffers of a copy on disk."""
        stored: Stored = data[0]
        return stored

    @staticmethod
    def bytes_up(data: Any) -> int:
        """Return the size in host memory of a copy from disk, if it may differ from before; else 0."""
        del data
        return 0


class ObjectContent(Content):
    """A content that has objects of users: a unit, or a small member of a bundle, which is then the unit."""

    # a member's state is its bundle's, but for nbytes, top and keys, the number of values and proxies that it is part
    # of

    usual_kind: type = object
    bundle: Any = None
    names: tuple[Hashable, ...] = ()  # of its allocations in the tier of its use, while it is there
    kinds: dict[int, type] | None = None  # the types of its objects that are not of the usual type
    stored_objects: dict[int, weakref.ref[ProxiedObject]] | None = None  # those with proxies (jit_unspill)

    @property
    def unit(self) -> Content:
        """The unit that moves when this content does."""
        return self.bundle or self

    @property
    def contents(self) -> tuple[ObjectContent, ...]:
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
        """Return the objects that may have proxies."""
        refs = tuple((self.stored_objects or {}).values())  # in one step: another thread may add one
        return [living for ref in refs if (living := ref()) is not None]

    @abstractmethod
    def object_at(self, index: int) -> Any:
        """Return one of its objects, while it is up."""

    def length_of(self, index: int) -> int | None:
        """Return the length of an object from the copies below; None if they do not have it."""
        views = self.views()
        shape = getattr(views[index], "shape", None) if index < len(views) else None
        return shape[0] if shape else None

    def views(self) -> Sequence[Any]:
        """Return the shapes of its objects, if there is a copy below."""
        return ()


class SkeletonUnit(ObjectContent):
    """A value without its parts, in memory or pickled on disk; ``nbytes`` is an array's own, else dask's."""

    def __init__(self, value: Any, nbytes: int) -> None:
        super().__init__(nbytes, HOST, HOST)
        self.value = value

    def object_at(self, index: int) -> Any:
        del index
        return self.value

    def take_up(self, tier: int) -> Any:
        del tier
        value, self.value = self.value, None
        return value

    def put_up(self, tier: int, data: Any) -> None:
        del tier
        self.value = data

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        del source
        return Pickled.write(disk, self.value) if to == DISK else self.on_disk.read(disk)


def each_once(locations: Iterable[tuple[ObjectContent, int]]) -> tuple[ObjectContent, ...]:
    """Return the units of locations, each once."""
    return tuple(dict.fromkeys(unit for unit, _ in locations))


# the skeleton of a value that is itself an array or a table
NO_SKELETON = SkeletonUnit(Slot(0), 0)


class Entry:
    """A value under one or more names: keys of the store, and handles."""

    # ``value``, ``names`` and ``key`` change under the store's lock, and may be read without it; the rest never changes

    __slots__ = ("key", "lazy", "locations", "names", "skeleton", "small", "units", "used_units", "value")

    def __init__(
        self, value: Any, skeleton: SkeletonUnit, locations: Sequence[tuple[ObjectContent, int]], lazy: bool = False
    ) -> None:
        self.value = value  # the value itself, if it was stored or read and its used units are still up; else ABSENT
        self.skeleton, self.locations = skeleton, locations  # without its parts; the unit and position of each part
        self.lazy = lazy  # parts come up one by one, at first use (jit_unspill): readers get proxies for them
        self.names, self.key = 0, ABSENT  # the number of keys and handles; the last key, for messages
        self.units: tuple[Content, ...]  # the units that move, each once: the parts, or their bundles
        self.small: tuple[ObjectContent, ...] = ()  # the parts that are in bundles
        if skeleton is NO_SKELETON or not locations:
            only = skeleton if skeleton is not NO_SKELETON else locations[0][0]
            self.units = (only.bundle or only,)
            if only.bundle is not None:
                self.small = (only,)
        else:
            parts = skeleton, *each_once(locations)
            self.units = tuple(dict.fromkeys(part.unit for part in parts))
            self.small = tuple(part for part in parts if part.bundle is not None)
        self.used_units = (skeleton,) if lazy else self.units  # the units that come up with the value

    @property
    def is_plain(self) -> bool:
        """True if the value has no parts on a device, and readers get no proxies."""
        return not self.lazy and all(unit.top == HOST for unit in self.units)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, in any tier."""
        return self.skeleton.nbytes + sum(part.nbytes for part in each_once(self.locations))
