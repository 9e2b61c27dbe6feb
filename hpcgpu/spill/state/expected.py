"""What the tasks need that are ready or run: it goes down last, and comes up before they start."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from hpcgpu.spill.state.units import Unit

# How many of the ready tasks are looked at: more would bring up what other tasks push down again before its turn.
_NEXT = 4
# So many tasks that are over may stay in the heap.
_FEW = 64


class _Need(NamedTuple):
    priority: tuple[Any, ...]
    running: bool
    units: tuple[Unit, ...]


class Expected:
    """Needs by task.

    Pure: SpillState makes one and calls it, under the store's lock.
    """

    def __init__(self) -> None:
        self._needs: dict[Hashable, _Need] = {}
        # those that are ready, the next to run first; with some that are so no more
        self._ready: list[tuple[tuple[Any, ...], int, Hashable]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._needs)

    def note(self, task: Hashable, units: tuple[Unit, ...], priority: tuple[Any, ...], running: bool) -> None:
        """Note what a task needs, in place of what was noted of it before."""
        self.forget(task)
        self._needs[task] = _Need(priority, running, units)
        if not running:
            self._count += 1
            heapq.heappush(self._ready, (priority, self._count, task))
            if len(self._ready) > 2 * len(self._needs) + _FEW:
                self._ready = sorted(self._pop_ready())
        for unit in units:
            if running:
                unit.running += 1
            else:
                unit.waiting = unit.waiting or {}
                unit.waiting[task] = priority

    def forget(self, task: Hashable) -> None:
        """A task needs nothing any more."""
        need = self._needs.pop(task, None)
        for unit in need.units if need else ():
            if need and need.running:
                unit.running -= 1
            elif unit.waiting:
                unit.waiting.pop(task, None)

    def soon(self) -> Iterator[Unit]:
        """Yield what the next ready tasks need and is not up."""
        found = list(islice(self._pop_ready(), _NEXT))
        for entry in found:
            heapq.heappush(self._ready, entry)
        for _, _, task in found:
            yield from (unit for unit in self._needs[task].units if unit.valid and unit.tier != unit.top)

    def _pop_ready(self) -> Iterator[tuple[tuple[Any, ...], int, Hashable]]:
        seen = set()
        while self._ready:
            entry = heapq.heappop(self._ready)
            need = self._needs.get(entry[2])
            if need is not None and not need.running and need.priority == entry[0] and entry[2] not in seen:
                seen.add(entry[2])
                yield entry
