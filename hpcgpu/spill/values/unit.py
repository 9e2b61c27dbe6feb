"""What moves between tiers, with what each place holds of it: device buffers, values in host memory.

The state machine decides where a unit is; here is what that means for its bytes. :meth:`Content.take` and
:meth:`Content.put` are called under the store's lock and only change references; :meth:`Content.copied` does the work,
without it.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Protocol

from hpcgpu.spill.state.units import DISK, HOST, Unit
from hpcgpu.spill.storage import pickled
from hpcgpu.spill.storage.disk import Disk, Stored

_NUMBERS = itertools.count()
_FEW = 8


class Whole(Protocol):
    """A value that units are parts of; :class:`hpcgpu.spill.values.entry.Entry` is one.

    ``value`` and ``key`` change under the store's lock; the rest never changes.
    """

    value: Any
    places: Sequence[tuple[Content, int]]
    lazy: bool
    key: Any

    @property
    def rest(self) -> Content:
        """The value without its parts."""


class Lent(Protocol):
    """An object of a unit that a proxy may stand for; :class:`hpcgpu.spill.proxies.part.Part` is one.

    Thread-safe. Executor calls :meth:`let_go`, without the store's lock, in the thread that carries the drop out.
    """

    index: int

    def let_go(self) -> None:
        """Take the object from the proxy: it is moved down."""


class Content(Unit, ABC):
    """A unit, and what each place holds of it; or a small part of a unit, a bundle, which it moves with.

    Catalog, Executor and Keeper change it, under the store's lock: also by :meth:`join`, :meth:`leave`,
    :meth:`note_kind`, :meth:`take` and :meth:`put`. :meth:`copied` runs without, in the thread that copies;
    readers look at it without.

    Attributes
    ----------
    bundle : Bundle or None
        Which that is; where it is and what becomes of it is told by the bundle. Of a member only ``nbytes``, ``top``
        and ``keys``, how many values and proxies it is a part of, mean anything.
    entries : collection of Whole
        The values that it is a part of, as far as something names them.
    names : tuple of hashable
        Of the allocations that it lies in where it is used, as long as it is there.
    kinds : dict of int to type, or None
        The types of its objects, where they are not the usual one.
    parts : dict of int to reference to Lent, or None
        Those of its objects that proxies stand for (jit_unspill).

    """

    usual_kind: type = object

    # Set where they change: a unit is made for every value, and with its containers a million of them would cost the
    # garbage collector seconds.
    bundle: Any = None
    entries: tuple[Whole, ...] | dict[Whole, None] = ()
    names: tuple[Hashable, ...] = ()
    kinds: dict[int, type] | None = None
    parts: dict[int, weakref.ref[Lent]] | None = None

    def __init__(self, nbytes: int, top: int, at: int) -> None:
        super().__init__(next(_NUMBERS), nbytes, top, at)

    @property
    def unit(self) -> Content:
        """What moves when this does."""
        return self.bundle or self

    @property
    def contents(self) -> tuple[Content, ...]:
        """What moves with it: itself, or the members of a bundle."""
        return (self,)

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
        """Be no part any more of a value that has no name."""
        if len(self.entries) == 1:
            self.entries = ()
        elif isinstance(self.entries, dict):
            del self.entries[entry]
        else:
            self.entries = tuple(e for e in self.entries if e is not entry)

    def kind_of(self, index: int) -> type:
        """Return the type of an object of it."""
        return self.kinds.get(index, self.usual_kind) if self.kinds else self.usual_kind

    def note_kind(self, index: int, kind: type) -> None:
        """Note the type of an object of it."""
        if kind is not self.usual_kind:
            self.kinds = self.kinds or {}
            self.kinds[index] = kind

    def living_parts(self) -> list[Lent]:
        """Return those objects for which there may be proxies."""
        refs = tuple((self.parts or {}).values())  # in one step: another thread may add one
        return [part for ref in refs if (part := ref()) is not None]

    @abstractmethod
    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Return an object of it, while it is up."""

    def length_of(self, index: int) -> int | None:
        """Return the length of an object of it as its copies below have it; None if that is not known."""
        views = self.views()
        shape = getattr(views[index], "shape", None) if index < len(views) else None
        return shape[0] if shape else None

    def views(self) -> Sequence[Any]:
        """Return what tells of the shapes of its objects, if it has a copy below."""
        return ()

    @abstractmethod
    def take(self, place: int) -> Any:  # noqa: ANN401
        """Give up what a place holds, and return it: it is freed when nothing refers to it any more."""

    @abstractmethod
    def put(self, place: int, data: Any) -> None:  # noqa: ANN401
        """Let a place hold what :meth:`copied` has returned."""

    @abstractmethod
    def copied(self, source: int, to: int, disk: Disk) -> Any:  # noqa: ANN401
        """Return a copy, for another place; what is in the source stays. Raises whatever disk, device or pickle do."""

    @staticmethod
    def stored(data: Any) -> Stored:  # noqa: ANN401
        """Return what a copy on disk has there."""
        found: Stored = data[0]
        return found

    @staticmethod
    def bytes_up(data: Any) -> int:  # noqa: ANN401
        """Return what a copy from disk takes in host memory, if that may differ from before; else 0."""
        del data
        return 0


class Rest(Content):
    """A value without its parts; there or pickled on disk.

    Catalog makes it, under the store's lock; threads as of :class:`Content`. ``nbytes`` is what dask says, and of an
    array its own.
    """

    _pickled: pickled.Pickled | None = None

    def __init__(self, value: Any, nbytes: int) -> None:  # noqa: ANN401
        super().__init__(nbytes, HOST, HOST)
        self.value = value

    def object_at(self, index: int) -> Any:  # noqa: ANN401
        """Return the value."""
        del index
        return self.value

    def take(self, place: int) -> Any:  # noqa: ANN401
        """Give up the value, or what is on disk."""
        data: Any
        if place == DISK:
            data, self._pickled = self._pickled, None
        else:
            data, self.value = self.value, None
        return data

    def put(self, place: int, data: Any) -> None:  # noqa: ANN401
        """Hold a copy."""
        if place == DISK:
            self._pickled = data
        else:
            self.value = data

    def copied(self, source: int, to: int, disk: Disk) -> Any:  # noqa: ANN401
        """Pickle to disk, or unpickle."""
        del source
        if to == DISK:
            return pickled.write(disk, self.value)
        assert self._pickled is not None
        return pickled.read(disk, self._pickled)


def each_once(places: Iterable[tuple[Content, int]]) -> tuple[Content, ...]:
    """Return the units of places, each once."""
    return tuple(dict.fromkeys(unit for unit, _ in places))
