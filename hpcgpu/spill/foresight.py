"""What the tasks need that are ready or run: it goes down last, and comes up before they start."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpcgpu.spill.unit import Unit

# How many of the ready tasks are looked at: more would bring up what other tasks push down again before its turn.
_NEXT = 4


@dataclass(frozen=True, slots=True)
class _Need:
    priority: tuple[Any, ...]
    running: bool
    units: tuple[Unit, ...]


class Foresight:
    """Needs by task; called under the store's lock."""

    def __init__(self) -> None:
        self._needs: dict[Any, _Need] = {}

    def expect(self, task: Any, units: Iterable[Unit], priority: tuple[Any, ...], running: bool) -> None:  # noqa: ANN401
        """Note what a task needs, in place of what was noted of it before."""
        self.forget(task)
        need = self._needs[task] = _Need(priority, running, tuple(units))
        for unit in need.units:
            if running:
                unit.running += 1
            else:
                unit.waiting = unit.waiting or {}
                unit.waiting[task] = priority

    def forget(self, task: Any) -> None:  # noqa: ANN401
        """A task needs nothing any more."""
        need = self._needs.pop(task, None)
        for unit in need.units if need else ():
            if need and need.running:
                unit.running -= 1
            elif unit.waiting:
                unit.waiting.pop(task, None)

    def wanted(self) -> list[Unit]:
        """Return what the next ready tasks need and is not up."""
        ready = (n for n in self._needs.values() if not n.running)
        soon = heapq.nsmallest(_NEXT, ready, key=lambda n: n.priority)
        return [u for need in soon for u in need.units if u.tier != u.top and u.counted]
