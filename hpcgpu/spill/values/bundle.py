"""Small contents that move together: alone, each would cost a copy, a page on disk, and more memory than it frees.

A bundle takes what is new until it is full, or moves. Of what its members are in memory, each has its own, which goes
with the last name of the member, wherever the bundle is; what a bundle has on disk goes with its last member.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from hpcgpu.spill.state.units import DISK, HOST
from hpcgpu.spill.storage import pickled
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.values.buffer import Buffer
from hpcgpu.spill.values.unit import Content, Rest, Whole

_Content = TypeVar("_Content", Buffer, Rest)
# What has as many bytes is a unit by itself. Of smaller arrays in host memory several views may count several times.
SMALL_BYTES = 1 << 10
# Reading one brings all up. With 64 a copy costs each a few microseconds; with more it would be hardly less.
_MEMBERS = 64
# A pickle of these is as big as they are, and cannot fail; nor can that of containers of them, as deep as this.
_DEPTH = 3
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})


def is_plain(x: Any, depth: int = _DEPTH) -> bool:  # noqa: ANN401
    """Tell whether a small value may be in a bundle: the pickle of others may be of any size, or fail."""
    kind: type = type(x)
    if kind in _PLAIN or issubclass(kind, np.generic):
        return True
    if kind is np.ndarray:
        return not x.dtype.hasobject
    if kind is dict:
        return is_plain([*x, *x.values()], depth)
    return kind in (list, tuple) and depth > 0 and all(is_plain(part, depth - 1) for part in x)


class Bundle(Content):
    """Small contents of one kind, that lie in one place and are used in one place.

    Bundles makes it; Executor adds names and lets members go. Threads as of :class:`Content`.
    """

    entries: dict[Whole, None]

    def __init__(self, top: int, at: int) -> None:
        super().__init__(0, top, at)
        self.members: dict[Any, None] = {}
        self.entries = {}
        self._stored: Any = None

    @property
    def is_open(self) -> bool:
        """Whether it may take one more."""
        return len(self.members) < _MEMBERS and self.valid in (0, 1 << self.at) and self.move is None and not self.fixed

    def add(self, content: Content) -> None:
        """Take one more."""
        content.bundle = self
        self.members[content] = None

    def remove(self, content: Content) -> None:
        """Let a member go, which no name holds any more."""
        del self.members[content]

    @property
    def contents(self) -> tuple[Any, ...]:
        """The members."""
        return tuple(self.members)

    def join(self, entry: Whole) -> None:
        """Have a part of one more value that has a name."""
        self.entries[entry] = None

    def leave(self, entry: Whole) -> None:
        """Have no part any more of a value that has no name."""
        del self.entries[entry]

    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Raise: its members have the objects."""
        raise NotImplementedError

    def take(self, place: int) -> Any:  # noqa: ANN401
        """Give up what is on disk, or what the members have."""
        if place == DISK:
            data, self._stored = self._stored, None
            return data
        return [member.take(place) for member in self.contents]

    def put(self, place: int, data: Any) -> None:  # noqa: ANN401
        """Hold a copy on disk, or let the members hold theirs."""
        if place == DISK:
            self._stored = data
            return
        for member, piece in data:
            if member in self.members:
                member.put(place, piece)


class Buffers(Bundle):
    """Small allocations of a device; on disk one lies after the other.

    The last name of a member may go at any time, and what it holds with it: each is looked at once, without a lock. On
    disk, and in host memory, each has bytes of its own: shape (bytes,), dtype uint8.
    """

    def views_of(self, member: Buffer) -> Sequence[Any]:
        """Return how the arrays of a member lie in the copy on disk."""
        stored = self._stored
        return next((views for each, views in stored[1] if each is member), ()) if stored else ()

    def copied(self, source: int, to: int, disk: Disk) -> Any:  # noqa: ANN401
        """Copy all members between the device, host memory and disk."""
        if source == DISK:
            stored, members = self._stored
            roots = disk.read(stored)
            return [(member, (root, views)) for root, (member, views) in zip(roots, members, strict=True)]
        if to == HOST:
            up = [(member, arrays) for member in self.contents if (arrays := tuple(member.arrays))]
            packed = up[0][0].device.pack_each([arrays for _, arrays in up], disk.empty) if up else []
            return [(member, piece) for (member, _), piece in zip(up, packed, strict=True)]
        there = [(member, *piece) for member in self.contents if (piece := member.in_host) is not None]
        if to == DISK:
            return disk.write([root.data for _, root, _ in there]), [(member, views) for member, _, views in there]
        return [(member, member.unpacked(root, views)) for member, root, views in there]


class Values(Bundle):
    """Small values (members: Rest) in host memory; on disk they are one pickle. Threads as of :class:`Content`."""

    def copied(self, source: int, to: int, disk: Disk) -> Any:  # noqa: ANN401
        """Pickle all members to disk, or unpickle."""
        del source
        if to == DISK:
            members = self.contents
            written = pickled.write(disk, [member.value for member in members])
            return written.stored, written, members
        _, written, members = self._stored
        return list(zip(members, pickled.read(disk, written), strict=True))


class Bundles:
    """The bundles that take what is new, by where it is used and where it lies.

    Under the store's lock only; Catalog makes it and calls it.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], Bundle] = {}

    def add(self, content: _Content) -> _Content:
        """Put a content that is new with others, if it is small; return it."""
        if content.nbytes >= SMALL_BYTES:
            return content
        key = content.top, content.at
        bundle = self._open.get(key)
        if bundle is None or not bundle.is_open:
            bundle = self._open[key] = (Values if type(content) is Rest else Buffers)(*key)
        bundle.add(content)
        return content
