"""The unit that moves between a device and host memory, an allocation with its arrays; and bundles of small units.

Small contents move together: alone, each would cost a copy, a page on disk, and more memory than it frees. A bundle
takes new contents until it is full, or moves. In memory each member has bytes of its own, which are freed with the
member's last name, in any tier. On disk a bundle has one slot, which is freed with the last member.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpcgpu.spill.devices import Device
from hpcgpu.spill.state import DISK, HOST
from hpcgpu.spill.storage.disk import Disk, Pickled
from hpcgpu.spill.values.unit import Content, ObjectContent, SkeletonUnit

# A content of this size is a unit by itself. Smaller arrays in host memory count once for each of their views.
SMALL_BYTES = 1 << 10
# Reading one member brings all up. With 64 members a copy costs each a few microseconds; more would hardly reduce that.
_MEMBERS = 64
# Pickles of these types are as big as the values, and cannot fail; so for containers, nested to this depth.
_DEPTH = 3
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})


class _Arrays(NamedTuple):
    """The arrays of a device buffer."""

    arrays: list[Any]
    positions: dict[int, int]  # by the array's id
    names: tuple[Hashable, ...]  # of the allocation


class Buffer(ObjectContent):
    """One allocation of a device, and the arrays in it: they move together, in one copy."""

    def __init__(self, device: Device, nbytes: int, top: int, name: Hashable) -> None:
        super().__init__(nbytes, top, top)
        self.device = device
        self.arrays: list[Any] = []  # of any shapes, strides and dtypes; empty while it is not on the device
        self._positions: dict[int, int] = {}
        self.names = (name,)
        # the result of Device.pack: bytes (shape (nbytes,), dtype uint8, contiguous, never written to), and the layout
        self.in_host: tuple[np.ndarray, list[Any]] | None = None

    @classmethod
    def of_packed(cls, device: Device, top: int, root: np.ndarray, views: Sequence[Any]) -> Buffer:
        """Return a buffer from a peer, which stays in host memory until its first use."""
        buffer = cls(device, root.nbytes, top, None)
        buffer.names, buffer.at, buffer.in_host = (), HOST, (root, list(views))
        return buffer

    def position_of(self, array: Any) -> tuple[int, bool]:
        """Return the position of an array, and whether the array is new, so that no copy has its layout."""
        position = self._positions.setdefault(id(array), len(self.arrays))
        if is_new := position == len(self.arrays):
            self.arrays.append(array)
        return position, is_new

    def object_at(self, index: int) -> Any:
        return self.arrays[index]

    def views(self) -> Sequence[Any]:
        """Return the layout of the arrays in the copy below."""
        below = self.in_host or self.on_disk
        if below is None and self.bundle is not None:
            return self.bundle.views_of(self)
        return below[1] if below else ()

    def packed(self, disk: Disk) -> tuple[np.ndarray, list[Any]]:
        """Return its bytes in host memory, and the layout of the arrays; it does not move, and is not on disk."""
        return self.in_host or self.device.pack(tuple(self.arrays), disk.empty)

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
            return self.device.pack(tuple(self.arrays), disk.empty)
        assert self.in_host is not None
        return self.unpacked(*self.in_host)

    def unpacked(self, root: np.ndarray, views: Sequence[Any]) -> _Arrays:
        """Return the arrays on the device, made from bytes in host memory."""
        arrays = self.device.unpack(root, views)
        name = id(self.device), self.device.buffer_of(arrays[0])[0]
        return _Arrays(arrays, {id(array): i for i, array in enumerate(arrays)}, (name,))


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
        super().__init__(0, top, at)
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
            packed = up[0][0].device.pack_each([arrays for _, arrays in up], disk.empty) if up else []
            return [(member, piece) for (member, _), piece in zip(up, packed, strict=True)]
        pieces = [(member, *piece) for member in self.contents if (piece := member.in_host) is not None]
        if to == DISK:
            return disk.write([root.data for _, root, _ in pieces]), [(member, views) for member, _, views in pieces]
        return [(member, member.unpacked(root, views)) for member, root, views in pieces]


class Values(Bundle):
    """Small values (SkeletonUnits) in host memory; on disk one pickle."""

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        del source
        if to == DISK:
            members = self.contents
            written = Pickled.write(disk, [member.value for member in members])
            return written.stored, written, members
        _, written, members = self.on_disk
        return list(zip(members, written.read(disk), strict=True))


_Content = TypeVar("_Content", Buffer, SkeletonUnit)


class Bundles:
    """The bundles that take new contents. IdentityMap makes it, and calls it under the store's lock."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], Bundle] = {}  # by the tier of use and the tier of the data

    def add(self, content: _Content) -> _Content:
        """Put a new content into a bundle, if it is small; return the content."""
        if content.nbytes >= SMALL_BYTES:
            return content
        key = content.top, content.at
        bundle = self._open.get(key)
        if bundle is None or not bundle.is_open:
            bundle = self._open[key] = (Values if type(content) is SkeletonUnit else Buffers)(*key)
        content.bundle, bundle.members[content] = bundle, None
        return content
