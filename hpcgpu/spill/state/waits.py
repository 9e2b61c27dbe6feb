"""Waits: units on their way up, units that tasks will need, and allocations that have failed.

The classes are pure: SpillState makes one of each, and calls it under the store's lock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from hpcgpu.spill.state import HOST, Fail, FailedAllocation, Instruction, Resume, Unit
from hpcgpu.spill.state.accounting import Accounting

# The number of ready tasks to look at: with more, units would come up that other tasks push down before their turn.
_NEXT = 4
# The number of tasks that may stay in the heap after their end.
_FEW = 64


class _Need(NamedTuple):
    priority: tuple[Any, ...]
    running: bool
    units: tuple[Unit, ...]


class Prefetch:
    """The units that tasks need, by task: they go down last, and come up before the task starts."""

    def __init__(self) -> None:
        self._needs: dict[Hashable, _Need] = {}
        # the ready tasks, the next to run first; some of them may be over
        self._ready: list[tuple[tuple[Any, ...], int, Hashable]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._needs)

    def add(self, task: Hashable, units: tuple[Unit, ...], priority: tuple[Any, ...], running: bool) -> None:
        """Keep the needs of a task in place of its earlier needs."""
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
        """Forget the needs of a task."""
        need = self._needs.pop(task, None)
        for unit in need.units if need else ():
            if need and need.running:
                unit.running -= 1
            elif unit.waiting:
                unit.waiting.pop(task, None)

    def soon(self) -> Iterator[Unit]:
        """Yield the units that the next ready tasks need and that are not up."""
        entries = list(islice(self._pop_ready(), _NEXT))
        for entry in entries:
            heapq.heappush(self._ready, entry)
        for _, _, task in entries:
            yield from (unit for unit in self._needs[task].units if unit.valid and unit.tier != unit.top)

    def _pop_ready(self) -> Iterator[tuple[tuple[Any, ...], int, Hashable]]:
        seen = set()
        while self._ready:
            entry = heapq.heappop(self._ready)
            need = self._needs.get(entry[2])
            if need is not None and not need.running and need.priority == entry[0] and entry[2] not in seen:
                seen.add(entry[2])
                yield entry


class Unspills:
    """Units on their way up, by the next tier. The first one waits for room there, and the others wait for it."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self._queues: dict[int, deque[Unit]] = {}
        self.ahead: Unit | None = None  # the unit that comes up before a task needs it: one, while no thread waits
        self.pauses = False  # a unit could not be brought up: no unit comes up ahead until the next tick

    def add(self, unit: Unit) -> None:
        """Let a unit continue up, if a ticket waits for it and no copy of it is under way."""
        if unit.waiters and unit.move is None:
            queue = self._queues.setdefault(_above(unit), deque())
            (queue.appendleft if _is_urgent(unit) else queue.append)(unit)

    def proceed(self, out: list[Instruction]) -> None:
        """Start the copies that have room now."""
        for tier, queue in self._queues.items():
            while queue and self._start(queue[0], tier, out):
                queue.popleft()

    def _start(self, unit: Unit, to: int, out: list[Instruction]) -> bool:
        """Start a copy up, if there is room or none can be made; return False if the unit must wait."""
        if unit.move is not None or not unit.waiters or unit.tier >= to or _above(unit) != to:
            return True  # its tickets were given up, or it is on its way, or has gone to disk
        self._accounting.make_room(to, out, unit.nbytes)
        if not self._accounting.fits(to, unit.nbytes) and self._accounting.leaving.get(to) and not _is_urgent(unit):
            return False
        self._accounting.start(unit, to, unit.waiters[0], out)
        return True

    def fetch_ahead(self, prefetch: Prefetch, out: list[Instruction]) -> None:
        """Bring up the first unit that the next tasks need and that fits without another move."""
        if self.ahead or self.pauses:
            return
        for unit in prefetch.soon():
            to = _above(unit)
            room = all(self._accounting.fits(tier, unit.nbytes, self._accounting.low) for tier in (to, unit.top))
            if room and unit.move is None and unit.lost is None:
                self.ahead = unit
                self._accounting.start(unit, to, None, out)
                return


def _is_urgent(unit: Unit) -> bool:
    return any(ticket.at_once for ticket in unit.waiters)


def _above(unit: Unit) -> int:
    return unit.top if unit.tier == HOST else HOST


class FailedAllocations:
    """The failed allocations that are ``waiting``, in order: freed bytes count for the first, then for the next."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self.waiting: list[FailedAllocation] = []

    def add(self, allocation: FailedAllocation) -> None:
        """Let an allocation wait."""
        last = max((a.until_bytes for a in self.waiting if a.tier == allocation.tier), default=0)
        allocation.had_bytes = self._accounting.freed.get(allocation.tier, 0)
        allocation.until_bytes = max(last, allocation.had_bytes) + allocation.nbytes
        self.waiting.append(allocation)

    def forget(self, allocation: FailedAllocation) -> None:
        """Forget an allocation; the later ones may still wait for its bytes, too."""
        if allocation in self.waiting:
            self.waiting.remove(allocation)
        self._start_anew()

    def serve(self, out: list[Instruction]) -> None:
        """Send down missing bytes that are not under way; resume allocations with room; fail hopeless ones."""
        accounting = self._accounting
        for allocation in tuple(self.waiting):
            freed, leaving = accounting.freed.get(allocation.tier, 0), accounting.leaving.get(allocation.tier, 0)
            if (missing := allocation.until_bytes - freed - leaving) > 0:
                accounting.send_down(allocation.tier, missing, missing, allocation, out)
                freed, leaving = accounting.freed.get(allocation.tier, 0), accounting.leaving.get(allocation.tier, 0)
            if freed >= allocation.until_bytes or not leaving:
                self.waiting.remove(allocation)
                out.append(Resume(allocation) if freed > allocation.had_bytes else Fail(allocation, None))
        self._start_anew()

    def _start_anew(self) -> None:
        if not self.waiting:
            self._accounting.freed.clear()
