"""Brings values up, and keeps them up while somebody uses them; in the thread that asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcgpu.errors import SpillError
from hpcgpu.spill.catalog import Catalog
from hpcgpu.spill.columns import UNTOLD, Outline
from hpcgpu.spill.disk import Disk
from hpcgpu.spill.entry import ABSENT, Entry
from hpcgpu.spill.handle import Packed
from hpcgpu.spill.host import HostObjects
from hpcgpu.spill.mover import Mover
from hpcgpu.spill.moves import Moves
from hpcgpu.spill.unit import Unit


class Keeper:
    """What a store reads its values with.

    Parameters
    ----------
    lock : RLock
        The store's.
    lazily : bool
        Parts of values come up one by one (jit_unspill).

    Attributes
    ----------
    on_fault : callable or None
        Called with the error when a value cannot be read back.

    """

    def __init__(self, lock: threading.RLock, moves: Moves, mover: Mover, lazily: bool) -> None:
        self._lock, self._moves, self._mover = lock, moves, mover
        self.catalog = Catalog(moves.watch, self if lazily else None)
        self.on_fault: Callable[[SpillError], None] | None = None

    def touch(self, units: Iterable[Unit]) -> None:
        """Note that units are used; under the lock."""
        self._moves.ledger.touch(units)

    def restore(self, entry: Entry, key: Any) -> Any:  # noqa: ANN401
        """Return the value of an entry, bringing up what is below.

        Raises
        ------
        SpillError
            A part cannot be read back; the cause is attached.

        """
        units = list(entry.used_units)
        with self.pinned(units):
            self._bring_up(units, repr(key))
            with self._lock:
                if entry.value is ABSENT:
                    entry.value = entry.assemble()
                    self.catalog.note(entry)
                return entry.value

    @contextmanager
    def keeping_up(self, unit: Unit) -> Iterator[None]:
        """Keep a part of a value where it can be used, for its proxy; raises as :meth:`restore`."""
        with self.pinned([unit]):
            self._bring_up([unit], f"a {unit.kind_of(0).__name__}")
            with self._lock:
                self.touch([unit])
                self.catalog.know(unit)
            yield

    def answer(self, unit: Unit, index: int, operation: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
        """Return what an operation on a data frame returns, or UNTOLD, if it must come up; raises as :meth:`restore`.

        What is read belongs to who asks: the store does not count it.
        """
        if not isinstance(unit, HostObjects):
            return UNTOLD
        with unit.lock:  # after a move that is under way
            stored = unit.to_glance_at()
        if stored is None:
            return UNTOLD
        found = UNTOLD

        def read(disk: Disk) -> int:
            nonlocal found
            outline = Outline(disk, stored, index)
            found = outline.answer(operation, *args)
            return outline.read_bytes

        with self._reporting(f"a {unit.kind_of(index).__name__}"):
            unit.glanced(self._moves.counted("disk_to_host", read))
        return found

    def packed(self, entry: Entry, key: Any) -> Packed:  # noqa: ANN401
        """Return the value of an entry as host bytes; raises as :meth:`restore`."""
        with self.pinned(entry.units), self._reporting(repr(key)):
            return self._moves.packed(entry)

    @contextmanager
    def pinned(self, units: Iterable[Unit]) -> Iterator[None]:
        """Let units move down no further."""
        held = list(units)
        with self._lock:
            for unit in held:
                unit.pins += 1
        try:
            yield
        finally:
            with self._lock:
                for unit in held:
                    unit.pins -= 1
            if self._moves.is_due():
                self._mover.wake()

    def _bring_up(self, units: list[Unit], what: str) -> None:
        with self._reporting(what):
            for unit in units:
                self._moves.bring_up(unit)

    @contextmanager
    def _reporting(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SpillError) as e:
            fault = SpillError(f"the value of {what} cannot be read back from disk: {e}")
            if self.on_fault:
                self.on_fault(fault)
            raise fault from e
