"""What moves from host memory to disk together: the objects that lie in the same allocations."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcgpu.spill import columns, pickled
from hpcgpu.spill.disk import Disk
from hpcgpu.spill.owners import Held, Name, held_by, name_of
from hpcgpu.spill.unit import Unit

if TYPE_CHECKING:
    from hpcgpu.spill.entry import Entry


class HostObjects(Unit):
    """Arrays or tables in host memory that are views of the same: one occupies as much as all do.

    On disk each has its own bytes, what lies inside another one's once. What nobody can ask for any more, since its
    keys are gone, is held in memory by the others, and is not written.

    Parameters
    ----------
    x : ndarray, DataFrame, Series or Table
        The first of them.
    name : int or frozenset of int
        Its name (:func:`hpcgpu.spill.owners.name_of`).
    nbytes : int
        Bytes of all that it keeps in memory.
    keeps_all : bool
        Proxies may ask for objects without keys (jit_unspill): all are written.

    """

    top = "host"
    usual_kind = np.ndarray

    # made for the second object: most are alone
    _positions: dict[int, int] | None = None
    _held: Held | None = None

    _users: list[weakref.ref[Entry]] | None = None
    _pickled: pickled.Pickled | None = None
    _glanced_bytes = 0

    def __init__(self, x: Any, name: Name, nbytes: int, keeps_all: bool) -> None:  # noqa: ANN401
        super().__init__("host", nbytes)
        self.note_kind(0, type(x))
        self._keeps_all = keeps_all
        self.objects = [x]
        self.names: tuple[Name, ...] = (name,)

    def position_of(self, x: Any, held: Held) -> int:  # noqa: ANN401
        """Return which of the objects this one is; a new one is taken up, of which there is no copy."""
        if self.objects and self.objects[0] is x:
            return 0
        position = self._positions.get(id(x)) if self._positions else None
        if position is None:
            position = self._take_up(x, held, name_of(held))
            self._pickled = None
            if not self.counted:
                self.nbytes = self.measured()
        return position

    def note_user(self, entry: Entry) -> None:
        """Note a value with objects of this unit in it."""
        if self._users is None:
            self._users = [weakref.ref(entry)]
            return
        if len(self._users) > 8 + 2 * len(self.objects):
            self._users = [user for user in self._users if user() is not None]
        self._users.append(weakref.ref(entry))

    def first_user(self) -> Entry | None:
        """Return the value with objects of this unit in it that was noted first."""
        return self._users[0]() if self._users else None

    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Return one of the objects."""
        return self.objects[index]

    def measured(self) -> int:
        """Return the bytes of the allocations, or of what lies on disk."""
        if self.tier == "disk" and self._pickled is not None:
            return self._pickled.nbytes
        return self.nbytes if self._held is None else sum(self._held.values())

    def copies(self) -> tuple[str, ...]:
        """Return where copies lie."""
        return ("disk",) if self.tier == "host" and self._pickled is not None else ()

    def drop_copy(self, tier: str) -> None:
        """Give up the copy on disk."""
        del tier
        self._pickled = None

    def to_glance_at(self) -> pickled.Pickled | None:
        """Return what lies on disk, if its columns should be read one by one."""
        stored = self._pickled
        if self.tier != "disk" or stored is None or not stored.late:
            return None
        # it pays to read all when so much of it must be read in any case, or has been read by and by
        spared = 2 * stored.early_bytes <= stored.nbytes and self._glanced_bytes < 2 * stored.nbytes
        return stored if spared else None

    def glanced(self, nbytes: int) -> None:
        """Note that so much was read without bringing it up."""
        self._glanced_bytes += nbytes

    def let_go(self) -> None:
        """Give up the objects."""
        self.objects, self.names, self._positions, self._held = [], (), None, {}

    def down(self, disk: Disk) -> int:
        """Host to disk."""
        asked_for = self._asked_for()
        kept = [x if i in asked_for else None for i, x in enumerate(self.objects)]
        try:
            apart = self._keeps_all and self.nbytes >= columns.LEAST_BYTES * len(kept)
            self._pickled = columns.write(disk, kept) if apart else pickled.write(disk, kept)
        except pickled.ImmovableError as e:
            raise pickled.ImmovableError(next(x for x in kept if x is not None), e) from e.__cause__
        self.let_go()
        return self._pickled.nbytes

    def up(self, disk: Disk) -> int:
        """Disk to host."""
        if self._pickled is None:
            return 0
        self._glanced_bytes = 0
        for x in columns.read(disk, self._pickled):
            if x is None:
                self.objects.append(None)
            else:
                held = held_by(x)
                self._take_up(x, held, name_of(held))
        return self._pickled.nbytes

    def _take_up(self, x: Any, held: Held, name: Name) -> int:  # noqa: ANN401
        position = len(self.objects)
        self.objects.append(x)
        self.note_kind(position, type(x))
        if position:
            if self._positions is None:
                self._positions = {}
            self._positions[id(x)] = position
        if name not in self.names:
            self.names += (name,)
        if self._held is None:
            self._held = held_by(self.objects[0])
        self._held.update(held)
        return position

    def _asked_for(self) -> set[int]:
        if self._keeps_all:
            return set(range(len(self.objects)))
        entries = [entry for user in self._users or () if (entry := user()) is not None]
        return {i for entry in entries for unit, i in entry.places if unit is self}
