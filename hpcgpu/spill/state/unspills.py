"""Ways up: of units that a thread waits for, and of units that come up ahead of their tasks."""

from __future__ import annotations

from collections import deque

from hpcgpu.spill.state.accounting import Accounting
from hpcgpu.spill.state.prefetch import Prefetch
from hpcgpu.spill.state.units import HOST, Instruction, Unit


class Unspills:
    """Units on their way up, by the next tier. The first one waits for room there, and the others wait for the first.

    Pure: SpillState makes one and calls it, under the store's lock.

    Attributes
    ----------
    ahead : Unit or None
        The unit that comes up before a task needs it: one at a time, and only while nobody waits.
    pauses : bool
        A unit could not be brought up: nothing comes up ahead until the next tick.

    """

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self._queues: dict[int, deque[Unit]] = {}
        self.ahead: Unit | None = None
        self.pauses = False

    def add(self, unit: Unit) -> None:
        """Let a unit go on up, if a ticket waits for it and no copy of it is under way."""
        if unit.waiters and unit.move is None:
            queue = self._queues.setdefault(_above(unit), deque())
            (queue.appendleft if _is_urgent(unit) else queue.append)(unit)

    def go_on(self, out: list[Instruction]) -> None:
        """Start the copies that have room now."""
        for tier, queue in self._queues.items():
            while queue and self._start(queue[0], tier, out):
                queue.popleft()

    def _start(self, unit: Unit, to: int, out: list[Instruction]) -> bool:
        """Start a copy up, if there is room or none can be made; return False if the unit must wait."""
        if unit.move is not None or not unit.waiters or unit.tier >= to or _above(unit) != to:
            return True  # its tickets were given up, or it is on its way; since then it may have gone to disk
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
