"""The unit that moves between a device and host memory: an allocation, with the arrays in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices.protocols import Device
from hpcgpu.spill.state.units import DISK, HOST
from hpcgpu.spill.storage.disk import Disk, Stored
from hpcgpu.spill.values.unit import ObjectContent


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
        self._stored: tuple[Stored, list[Any]] | None = None

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
        """Return one of the arrays."""
        return self.arrays[index]

    def views(self) -> Sequence[Any]:
        """Return the layout of the arrays in the copy below."""
        below = self.in_host or self._stored
        if below is None and self.bundle is not None:
            return self.bundle.views_of(self)
        return below[1] if below else ()

    def packed(self, disk: Disk) -> tuple[np.ndarray, list[Any]]:
        """Return its bytes in host memory, and the layout of the arrays; it does not move, and is not on disk."""
        return self.in_host or self.device.pack(tuple(self.arrays), disk.empty)

    def take(self, tier: int) -> Any:
        """Give up the arrays, the bytes in host memory, or the copy on disk."""
        data: Any
        if tier == DISK:
            data, self._stored = self._stored, None
        elif tier == HOST:
            data, self.in_host = self.in_host, None
        else:
            data = self.arrays, self._positions
            self.arrays, self._positions = [], {}
        return data

    def put(self, tier: int, data: Any) -> None:
        """Hold a copy."""
        if tier == DISK:
            self._stored = data
        elif tier == HOST:
            self.in_host = data
        else:
            self.arrays, self._positions, self.names = data

    def copied(self, source: int, to: int, disk: Disk) -> Any:
        """Copy between the device, host memory and disk."""
        if to == DISK and self.in_host is not None:
            root, views = self.in_host
            return disk.write([root.data]), views
        if source == DISK and self._stored is not None:
            stored, views = self._stored
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
