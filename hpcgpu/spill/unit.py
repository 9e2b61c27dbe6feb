"""What moves between tiers: a device buffer, or the part of a value that is in host memory."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcgpu.spill import pickled
from hpcgpu.spill.devices import Device
from hpcgpu.spill.disk import Disk, Stored

if TYPE_CHECKING:
    from hpcgpu.spill.entry import Entry
    from hpcgpu.spill.part import Part

_NAMES = itertools.count()
_FEW = 8
TIERS = ("device", "host", "disk")


class Unit(ABC):
    """Something that lies in one tier.

    Attributes
    ----------
    top : str
        The tier in which it is used.
    lock : Lock
        Held while it moves or is read.
    pins : int
        How many use it now: it does not move down.
    entries : collection of Entry
        The values that it is a part of, as far as keys name them.
    counted : bool
        Whether there is one.
    volatile : bool
        User code has it and may write to it at any time: copies of it that lie below are worth nothing.
    waiting : dict or None
        Priorities of the tasks that are ready and need it.
    running : int
        How many tasks that run need it.
    order : OrderedDict or None
        The ledger's, in which it is, by name.
    kinds : dict of int to type, or None
        The types of its objects, where they are not the usual one.
    parts : dict of int to Part, or None
        Those of its objects that proxies stand for (jit_unspill).

    """

    top: str
    usual_kind: type = object

    # Set where they change: a unit is made for every value, and with its four containers a million of them would cost
    # the garbage collector seconds.
    age = pins = running = 0
    counted = volatile = False
    entries: tuple[Entry, ...] | dict[Entry, None] = ()
    order: OrderedDict[int, Unit] | None = None
    waiting: dict[Any, tuple[Any, ...]] | None = None
    kinds: dict[int, type] | None = None
    parts: dict[int, Part] | None = None

    def __init__(self, tier: str, nbytes: int) -> None:
        self.name = next(_NAMES)
        self.tier, self.nbytes = tier, nbytes
        self.lock = threading.Lock()

    def join(self, entry: Entry) -> None:
        """Become a part of one more value that keys name."""
        if not self.entries:
            self.entries = (entry,)
        elif isinstance(self.entries, dict):
            self.entries[entry] = None
        elif len(self.entries) < _FEW:
            self.entries += (entry,)
        else:  # many views of one array
            self.entries = dict.fromkeys((*self.entries, entry))

    def leave(self, entry: Entry) -> None:
        """Be no part any more of a value that no key names."""
        if len(self.entries) == 1:
            self.entries = ()
        elif isinstance(self.entries, dict):
            del self.entries[entry]
        else:
            self.entries = tuple(e for e in self.entries if e is not entry)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the move that is under way; return whether it has ended."""
        if ended := self.lock.acquire(timeout=timeout_s):
            self.lock.release()
        return ended

    def kind_of(self, index: int) -> type:
        """Return the type of an object of it."""
        return self.kinds.get(index, self.usual_kind) if self.kinds else self.usual_kind

    def note_kind(self, index: int, kind: type) -> None:
        """Note the type of an object of it."""
        if kind is not self.usual_kind:
            self.kinds = self.kinds or {}
            self.kinds[index] = kind

    def note_part(self, index: int, part: Part) -> None:
        """Note an object for which a proxy may stand; the first one stays."""
        if self.parts is None:
            self.parts = {}
        self.parts.setdefault(index, part)

    @abstractmethod
    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Return an object of it, while it is up."""

    def measured(self) -> int:
        """Return its bytes in the tier where it is now; ``nbytes`` is what was counted last."""
        return self.nbytes

    @abstractmethod
    def copies(self) -> tuple[str, ...]:
        """Return the tiers below its own in which a copy of it lies, the upper one first."""

    @abstractmethod
    def drop_copy(self, tier: str) -> None:
        """Give up the copy in a tier."""

    @abstractmethod
    def let_go(self) -> None:
        """Give up what lies in its own tier: a copy is below."""

    @abstractmethod
    def down(self, disk: Disk) -> int:
        """Copy it one tier down, and give up what lies in its own; return the bytes. On an error it stays."""

    @abstractmethod
    def up(self, disk: Disk) -> int:
        """Copy it one tier up; what is below stays as a copy. Return the bytes; on an error it stays."""


class Buffer(Unit):
    """One allocation of a device, and the arrays that lie in it: they move together, once."""

    top = "device"

    def __init__(self, device: Device, nbytes: int) -> None:
        super().__init__("device", nbytes)
        self.device = device
        self.arrays: list[Any] = []
        self._positions: dict[int, int] = {}
        self._packed: tuple[np.ndarray, list[Any]] | None = None
        self._stored: tuple[Stored, list[Any]] | None = None

    @classmethod
    def of_packed(cls, device: Device, root: np.ndarray, views: Sequence[Any]) -> Buffer:
        """Return a buffer that came from a peer: it is in host memory until somebody uses it."""
        buffer = cls(device, root.nbytes)
        buffer.tier, buffer._packed = "host", (root, list(views))
        return buffer

    def position_of(self, array: Any) -> int:  # noqa: ANN401
        """Return which of the arrays this one is; a new one is taken up, of which no copy tells how it lies."""
        position = self._positions.setdefault(id(array), len(self.arrays))
        if position == len(self.arrays):
            self.arrays.append(array)
            self._packed = self._stored = None
        return position

    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Return one of the arrays."""
        return self.arrays[index]

    def packed(self, disk: Disk) -> tuple[np.ndarray, list[Any]]:
        """Return its bytes on the host and how the arrays lie in them, wherever it is; it does not move."""
        if self.tier != "device" or not self.volatile:
            if self._packed is not None:
                return self._packed
            if self._stored is not None:
                return disk.read(self._stored[0])[0], self._stored[1]
        return self.device.pack(self.arrays, disk.empty)

    def copies(self) -> tuple[str, ...]:
        """Return where copies lie."""
        host = self.tier == "device" and self._packed is not None
        disk = self.tier != "disk" and self._stored is not None
        return ("host",) * host + ("disk",) * disk

    def drop_copy(self, tier: str) -> None:
        """Give up the copy in host memory or on disk."""
        if tier == "host":
            self._packed = None
        else:
            self._stored = None

    def let_go(self) -> None:
        """Give up the arrays, or the bytes in host memory."""
        if self.tier == "device":
            self.arrays, self._positions = [], {}
        else:
            self._packed = None

    def down(self, disk: Disk) -> int:
        """Device to host, or host to disk."""
        if self.tier == "device":
            self._packed = self.device.pack(self.arrays, disk.empty)
        elif self._packed is not None:
            root, views = self._packed
            self._stored = (disk.write([root.data]), views)
        self.let_go()
        return self.nbytes

    def up(self, disk: Disk) -> int:
        """Disk to host, or host to device."""
        if self.tier == "disk" and self._stored is not None:
            stored, views = self._stored
            self._packed = (disk.read(stored)[0], views)
        elif self.tier == "host" and self._packed is not None:
            self.arrays = self.device.unpack(*self._packed)
            self._positions = {id(array): i for i, array in enumerate(self.arrays)}
        return self.nbytes


class Rest(Unit):
    """A value without its parts; there or pickled on disk."""

    top = "host"
    _pickled: pickled.Pickled | None = None

    def __init__(self, value: Any, nbytes: int) -> None:  # noqa: ANN401
        super().__init__("host", nbytes)
        self.value = value

    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Return the value."""
        del index
        return self.value

    def copies(self) -> tuple[str, ...]:
        """Return where copies lie."""
        return ("disk",) if self.tier == "host" and self._pickled is not None else ()

    def drop_copy(self, tier: str) -> None:
        """Give up the copy on disk."""
        del tier
        self._pickled = None

    def let_go(self) -> None:
        """Give up the value."""
        self.value = None

    def down(self, disk: Disk) -> int:
        """Host to disk."""
        self._pickled = pickled.write(disk, self.value)
        self.let_go()
        return self.nbytes

    def up(self, disk: Disk) -> int:
        """Disk to host."""
        if self._pickled is not None:
            self.value = pickled.read(disk, self._pickled)
        return self.nbytes
