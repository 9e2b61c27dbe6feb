"""Small contents that move together: alone, each would cost a copy, a page on disk, and more memory than it frees.

A bundle takes new contents until it is full, or moves. In memory each member has bytes of its own, which are freed with
the member's last name, in any tier. On disk a bundle has one slot, which is freed with the last member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from hpcgpu.spill.state.units import DISK, HOST
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.values import serialization
from hpcgpu.spill.values.buffer import Buffer
from hpcgpu.spill.values.unit import Content, SkeletonUnit

_Content = TypeVar("_Content", Buffer, SkeletonUnit)
# A content of this size is a unit by itself. Smaller arrays in host memory count once for each of their views.
SMALL_BYTES = 1 << 10
# Reading one member brings all up. With 64 members a copy costs each a few microseconds; more would hardly reduce that.
_MEMBERS = 64
# Pickles of these types are as big as the values, and cannot fail; so for containers, nested to this depth.
_DEPTH = 3
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})


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
        self._stored: Any = None

    @property
    def is_open(self) -> bool:
        """True if it may take one more member."""
        return len(self.members) < _MEMBERS and self.valid in (0, 1 << self.at) and self.move is None and not self.fixed

    @property
    def contents(self) -> tuple[Any, ...]:
        """The members."""
        return tuple(self.members)

    def take(self, tier: int) -> Any:
        """Give up the copy on disk, or the data of the members."""
        if tier == DISK:
            data, self._stored = self._stored, None
            return data
        return [member.take(tier) for member in self.contents]

    def put(self, tier: int, data: Any) -> None:
        """Hold a copy on disk, or let the members hold theirs."""
        if tier == DISK:
            self._stored = data
            return
        for member, piece in data:
            if member in self.members:
                member.put(tier, piece)


class Buffers(Bundle):
    """Small allocations of a device; in host memory each has bytes of its own, on disk one follows the other."""

    # a member may lose its last name and its memory at any time: copied() reads each member once, without a lock

    def views_of(self, member: Buffer) -> Sequence[Any]:
        """Return the layout of a member's arrays in the copy on disk."""
        stored = self._stored
        return next((views for each, views in stored[1] if each is member), ()) if stored else ()

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        """Copy all members between the device, host memory and disk."""
        if source == DISK:
            stored, members = self._stored
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
        """Pickle all members to disk, or unpickle."""
        del source
        if to == DISK:
            members = self.contents
            written = serialization.write(disk, [member.value for member in members])
            return written.stored, written, members
        _, written, members = self._stored
        return list(zip(members, serialization.read(disk, written), strict=True))


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
