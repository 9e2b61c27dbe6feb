"""The values of tasks that are ready or run: it goes down last, and comes up before they start."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from hpcgpu.spill.state.units import Unit

# The number of ready tasks that are looked at: with more, units would come up that other tasks push down again before
# their turn.
_NEXT = 4
# The number of tasks that may stay in the heap after their end.
_FEW = 64


class _Need(NamedTuple):
    priority: tuple[Any, ...]
    running: bool
    units: tuple[Unit, ...]


class Prefetch:
    """The units that tasks need, by task.

    Pure: SpillState makes one and calls it, under the store's lock.
    """

    def __init__(self) -> None:
        self._needs: dict[Hashable, _Need] = {}
        # the ready tasks, the next to run first; some may be ready no more
        self._ready: list[tuple[tuple[Any, ...], int, Hashable]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._needs)

    def add(self, task: Hashable, units: tuple[Unit, ...], priority: tuple[Any, ...], running: bool) -> None:
        """Keep what a task needs; it replaces what was kept for the task before."""
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
        """Forget what a task needs."""
        need = self._needs.pop(task, None)
        for unit in need.units if need else ():
            if need and need.running:
                unit.running -= 1
            elif unit.waiting:
                unit.waiting.pop(task, None)

    def soon(self) -> Iterator[Unit]:
        """Yield the units that the next ready tasks need and that are not up."""
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
