"""What moves from host memory to disk together: the objects that lie in the same allocations."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from hpcgpu.spill import columns, pickled
from hpcgpu.spill.disk import Disk
from hpcgpu.spill.owners import Held, held_by
from hpcgpu.spill.unit import Unit

if TYPE_CHECKING:
    from hpcgpu.spill.entry import Entry

Name = frozenset[int]


def name_of(held: Held, x: Any) -> Name:  # noqa: ANN401
    """Return what objects of the same allocations share."""
    return frozenset(held.owners or (id(x),))


class HostObjects(Unit):
    """Arrays or tables in host memory that are views of the same: one occupies as much as all do.

    On disk each has its own bytes, what lies inside another one's once. What nobody can ask for any more, since its
    keys are gone, is held in memory by the others, and is not written.

    Parameters
    ----------
    keeps_all : bool
        Proxies may ask for objects without keys (jit_unspill): all are written.

    """

    top = "host"

    def __init__(self, keeps_all: bool) -> None:
        super().__init__("host", 0)
        self._keeps_all = keeps_all
        self.objects: list[Any] = []
        self.names: tuple[Name, ...] = ()
        self._positions: dict[int, int] | None = None  # made for the second object: most are alone
        self._owners: dict[int, int] | None = None
        self._more_bytes = 0
        self._pickled: pickled.Pickled | None = None
        self._users: list[weakref.ref[Entry]] = []
        self._glanced_bytes = 0

    def position_of(self, x: Any, held: Held) -> int:  # noqa: ANN401
        """Return which of the objects this one is; a new one is taken up, of which there is no copy."""
        if self.objects and self.objects[0] is x:
            return 0
        position = self._positions.get(id(x)) if self._positions else None
        if position is None:
            position = self._take_up(x, held)
            self._pickled = None
            if not self.counted:
                self.nbytes = self.measured()
        return position

    def note_user(self, entry: Entry) -> None:
        """Note a value with objects of this unit in it."""
        if len(self._users) > 8 + 2 * len(self.objects):
            self._users = [user for user in self._users if user() is not None]
        self._users.append(weakref.ref(entry))

    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Return one of the objects."""
        return self.objects[index]

    def measured(self) -> int:
        """Return the bytes of the allocations, or of what lies on disk."""
        if self.tier == "disk" and self._pickled is not None:
            return self._pickled.nbytes
        return sum(self._owners.values()) + self._more_bytes if self._owners else self._more_bytes

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
        self.objects, self.names, self._positions, self._owners, self._more_bytes = [], (), None, None, 0

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
                self._take_up(x, held_by(x))
        return self._pickled.nbytes

    def _take_up(self, x: Any, held: Held) -> int:  # noqa: ANN401
        position = len(self.objects)
        self.objects.append(x)
        if position:
            if self._positions is None:
                self._positions = {}
            self._positions[id(x)] = position
        if (name := name_of(held, x)) not in self.names:
            self.names += (name,)
            self._owners = {**self._owners, **held.owners} if self._owners else held.owners
        self._more_bytes += held.more_bytes
        return position

    def _asked_for(self) -> set[int]:
        if self._keeps_all:
            return set(range(len(self.objects)))
        entries = [entry for user in self._users if (entry := user()) is not None]
        return {i for entry in entries for unit, i in entry.places if unit is self}
