"""The units that move between tiers, with their data, and the stored values that they are parts of.

The state machine decides the tier of a unit; these classes hold and copy its data. :meth:`Content.take` and
:meth:`Content.put` run under the store's lock and only change references; :meth:`Content.copied` does the work, without
the lock.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpcgpu.spill.devices.device import Device
from hpcgpu.spill.state.instructions import DISK, HOST, Unit
from hpcgpu.spill.storage.disk import Disk, Pickled
from hpcgpu.spill.values.take_apart import Slot

ABSENT = object()
NUMBERS = itertools.count()  # the names of units
# A content of this size is a unit by itself. Smaller arrays in host memory count once for each of their views.
SMALL_BYTES = 1 << 10
# Reading one member brings all up. With 64 members a copy costs each a few microseconds; more would hardly reduce that.
_MEMBERS = 64
# Pickles of these types are as big as the values, and cannot fail; so for containers, nested to this depth.
_DEPTH = 3
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
# The result of Device.pack: bytes (shape (nbytes,), dtype uint8, contiguous, never written to), and the layout.
InHost = tuple[np.ndarray, list[Any]]


class Content(Unit, ABC):
    """A unit, and its data in each tier. Its methods but ``copied`` run under the store's lock."""

    # ``copied`` runs in the thread that copies; readers look at a content without the lock

    # The values with names that it is a part of. Containers are set only when they change: every value has a unit, and
    # with their containers a million of them would cost the garbage collector seconds.
    entries: tuple[()] | tuple[Entry] | dict[Entry, None] = ()
    on_disk: Any = None  # the stored buffers first, then what reading needs

    @property
    @abstractmethod
    def contents(self) -> tuple[ObjectContent, ...]:
        """The objects that move with it: itself, or the members of a bundle."""

    def join(self, entry: Entry) -> None:
        """Become a part of one more value that has a name."""
        if isinstance(self.entries, dict):
            self.entries[entry] = None
        else:
            self.entries = dict.fromkeys((*self.entries, entry)) if self.entries else (entry,)

    def leave(self, entry: Entry) -> None:
        """Forget a value that has lost its last name."""
        if isinstance(self.entries, dict):
            del self.entries[entry]
        else:
            self.entries = ()

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
    def bytes_up(data: Any) -> int:
        """Return the size in host memory of a copy from disk, if it may differ from before; else 0."""
        return 0


class ObjectContent(Content):
    """A content that has objects of users: a unit, or a small member of a bundle, which is then the unit.

    A member's state is its bundle's, but for nbytes, top and keys, the number of its entries.
    """

    usual_kind: type = object
    bundle: Any = None
    names: tuple[Hashable, ...] = ()  # of its allocations in the tier of its use, while it is there
    kinds: dict[int, type] | None = None  # the types of its objects that are not of the usual type
    # those with proxies (jit_unspill), each a hpcgpu.spill.store.identity_map.StoredObject
    stored_objects: dict[int, weakref.ref[Any]] | None = None

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

    @abstractmethod
    def object_at(self, index: int) -> Any:
        """Return one of its objects, while it is up."""

    def answers_of(self, index: int) -> Mapping[str, Any]:
        """Return an object's ``len`` and ``name`` as far as the copies below have them."""
        return {}


class SkeletonUnit(ObjectContent):
    """A value without its parts, in memory or pickled on disk; ``nbytes`` is an array's own, else dask's."""

    def __init__(self, value: Any, nbytes: int) -> None:
        super().__init__(next(NUMBERS), nbytes, HOST, HOST)
        self.value = value

    def object_at(self, index: int) -> Any:
        return self.value

    def take_up(self, tier: int) -> Any:
        value, self.value = self.value, None
        return value

    def put_up(self, tier: int, data: Any) -> None:
        self.value = data

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        return Pickled.write(disk, self.value) if to == DISK else self.on_disk.read(disk)


# The unit and the position of an object.
Location = tuple[ObjectContent, int]


def each_once(locations: Iterable[Location]) -> tuple[ObjectContent, ...]:
    """Return the units of locations, each once."""
    return tuple(dict.fromkeys(unit for unit, _ in locations))


# the skeleton of a value that is itself an array or a table
NO_SKELETON = SkeletonUnit(Slot(0), 0)


class Entry:
    """A value under one or more names: keys of the store, and handles.

    ``value``, ``names`` and ``key`` change under the store's lock, and may be read without it; the rest never changes.
    """

    __slots__ = ("key", "lazy", "locations", "names", "skeleton", "small", "units", "used_units", "value")

    def __init__(self, value: Any, skeleton: SkeletonUnit, locations: Sequence[Location], lazy: bool = False) -> None:
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


class Buffer(ObjectContent):
    """One allocation of a device, and the arrays in it: they move together, in one copy."""

    def __init__(self, device: Device, nbytes: int, top: int, in_host: InHost | None = None) -> None:
        super().__init__(next(NUMBERS), nbytes, top, HOST if in_host else top)
        self.device = device
        self.arrays: list[Any] = []  # of any shapes, strides and dtypes; empty while it is not on the device
        self._positions: dict[int, int] = {}  # by the array's id
        self.in_host = in_host  # in the beginning, if it came from a peer

    def position_of(self, array: Any) -> tuple[int, bool]:
        """Return the position of an array, and whether the array is new, so that no copy has its layout."""
        position = self._positions.setdefault(id(array), len(self.arrays))
        if is_new := position == len(self.arrays):
            self.arrays.append(array)
        return position, is_new

    def object_at(self, index: int) -> Any:
        return self.arrays[index]

    def answers_of(self, index: int) -> Mapping[str, Any]:
        below = self.in_host or self.on_disk
        if below is None and self.bundle is not None:
            below = None, self.bundle.views_of(self)
        shape = getattr(below[1][index], "shape", None) if below and index < len(below[1]) else None
        return {"len": shape[0]} if shape else {}

    def packed(self, disk: Disk) -> InHost:
        """Return its bytes in host memory, and the layout of the arrays; it does not move, and is not on disk."""
        return self.in_host or self.device.pack([tuple(self.arrays)], disk.slabs.empty)[0]

    def take_up(self, tier: int) -> Any:
        data: Any
        if tier == HOST:
            data, self.in_host = self.in_host, None
        else:
            data = self.arrays, self._positions
            self.arrays, self._positions = [], {}
        return data

    def put_up(self, tier: int, data: Any) -> None:
        if tier == HOST:
            self.in_host = data
        else:
            self.arrays, self._positions, self.names = data

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        if to == DISK and self.in_host is not None:
            root, views = self.in_host
            return disk.write([root.data]), views
        if source == DISK and self.on_disk is not None:
            stored, views = self.on_disk
            return disk.read(stored)[0], views
        if to == HOST:
            return self.device.pack([tuple(self.arrays)], disk.slabs.empty)[0]
        assert self.in_host is not None
        return self.unpacked(*self.in_host)

    def unpacked(self, root: np.ndarray, views: Sequence[Any]) -> Any:
        """Return the arrays on the device, made from bytes in host memory; their positions; the allocation's names."""
        arrays = self.device.unpack(root, views)
        name = id(self.device), self.device.buffer_of(arrays[0])[0]
        return arrays, {id(array): i for i, array in enumerate(arrays)}, (name,)


def is_plain(x: Any, depth: int = _DEPTH) -> bool:
    """Tell whether a small value may be in a bundle: the pickles of other values may be of any size, or fail."""
    kind: type = type(x)
    if kind in _PLAIN:
        return True
    if kind is np.ndarray or (issubclass(kind, np.generic) and kind.__module__ == "numpy"):  # no subclass of a user's
        return not x.dtype.hasobject  # a record may have objects
    if kind is dict:
        return is_plain([*x, *x.values()], depth)
    return kind in (list, tuple) and depth > 0 and all(is_plain(part, depth - 1) for part in x)


class Bundle(Content):
    """Small contents of one kind, all in one tier, and all used in one tier."""

    def __init__(self, top: int, at: int) -> None:
        super().__init__(next(NUMBERS), 0, top, at)
        self.members: dict[Any, None] = {}
        self.entries = {}

    @property
    def is_open(self) -> bool:
        """True if it may take one more member."""
        return len(self.members) < _MEMBERS and self.valid in (0, 1 << self.at) and self.move is None and not self.fixed

    @property
    def contents(self) -> tuple[Any, ...]:
        return tuple(self.members)

    def take_up(self, tier: int) -> Any:
        return [member.take(tier) for member in self.contents]

    def put_up(self, tier: int, data: Any) -> None:
        for member, piece in data:
            if member in self.members:
                member.put(tier, piece)


class Buffers(Bundle):
    """Small allocations of a device; in host memory each has bytes of its own, on disk one follows the other."""

    # a member may lose its last name and its memory at any time: copied() reads each member once, without a lock

    def views_of(self, member: Buffer) -> Sequence[Any]:
        """Return the layout of a member's arrays in the copy on disk."""
        stored = self.on_disk
        return next((views for each, views in stored[1] if each is member), ()) if stored else ()

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        if source == DISK:
            stored, members = self.on_disk
            roots = disk.read(stored)
            return [(member, (root, views)) for root, (member, views) in zip(roots, members, strict=True)]
        if to == HOST:
            up = [(member, arrays) for member in self.contents if (arrays := tuple(member.arrays))]
            packed = up[0][0].device.pack([arrays for _, arrays in up], disk.slabs.empty) if up else []
            return [(member, piece) for (member, _), piece in zip(up, packed, strict=True)]
        pieces = [(member, *piece) for member in self.contents if (piece := member.in_host) is not None]
        if to == DISK:
            return disk.write([root.data for _, root, _ in pieces]), [(member, views) for member, _, views in pieces]
        return [(member, member.unpacked(root, views)) for member, root, views in pieces]


class Values(Bundle):
    """Small values (SkeletonUnits) in host memory; on disk one pickle."""

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        if to == DISK:
            members = self.contents
            written = Pickled.write(disk, [member.value for member in members])
            return written.stored, written, members
        _, written, members = self.on_disk
        return list(zip(members, written.read(disk), strict=True))
