"""Ways up: of what somebody waits for, and ahead of the tasks that will need it."""

from __future__ import annotations

from collections import deque

from hpcgpu.spill.state.expected import Expected
from hpcgpu.spill.state.tiers import Tiers
from hpcgpu.spill.state.units import HOST, Instruction, Unit


class Ups:
    """Units on their way up, by the place that comes next; there the first waits for room, and the others for it.

    Pure: SpillState makes one and calls it, under the store's lock.

    Attributes
    ----------
    ahead : Unit or None
        What comes up before a task needs it: one at a time, and only while nobody waits.
    pauses : bool
        Something could not be brought up; nothing comes up ahead until the next tick.

    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._queues: dict[int, deque[Unit]] = {}
        self.ahead: Unit | None = None
        self.pauses = False

    def add(self, unit: Unit) -> None:
        """Let a unit go on up, if somebody waits for it and it is not copied just now."""
        if unit.waiters and unit.move is None:
            queue = self._queues.setdefault(_above(unit), deque())
            (queue.appendleft if _is_urgent(unit) else queue.append)(unit)

    def go_on(self, out: list[Instruction]) -> None:
        """Start what there is room for now."""
        for place, queue in self._queues.items():
            while queue and self._start(queue[0], place, out):
                queue.popleft()

    def _start(self, unit: Unit, to: int, out: list[Instruction]) -> bool:
        """Start on the way up, if there is room or none can be made; return False for one that is to wait."""
        if unit.move is not None or not unit.waiters or unit.tier >= to:
            return True  # who needed it has given up, or it is on its way
        self._tiers.make_room(to, out, unit.nbytes)
        if not self._tiers.fits(to, unit.nbytes) and self._tiers.leaving.get(to) and not _is_urgent(unit):
            return False
        self._tiers.start(unit, to, unit.waiters[0], out)
        return True

    def fetch_ahead(self, expected: Expected, out: list[Instruction]) -> None:
        """Bring up the first of what the next tasks need for which there is room without moving anything else."""
        if self.ahead or self.pauses:
            return
        for unit in expected.soon():
            to = _above(unit)
            room = all(self._tiers.fits(place, unit.nbytes, self._tiers.low) for place in (to, unit.top))
            if room and unit.move is None and unit.lost is None:
                self.ahead = unit
                self._tiers.start(unit, to, None, out)
                return


def _is_urgent(unit: Unit) -> bool:
    return any(ticket.at_once for ticket in unit.waiters)


def _above(unit: Unit) -> int:
    return unit.top if unit.tier == HOST else HOST
