"""Allocations that have failed on a device: threads that wait until something has gone down."""

from __future__ import annotations

from hpcgpu.spill.state.tiers import Tiers
from hpcgpu.spill.state.units import Fail, Instruction, Resume, Room


class Rooms:
    """Who is ``waiting``, in the order in which they came: what is freed counts for the first, then for the next.

    Pure: SpillState makes one and calls it, under the store's lock. Who waits is resumed or failed by an instruction.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self.waiting: list[Room] = []

    def add(self, room: Room) -> None:
        """Let somebody wait."""
        last = max((r.until_bytes for r in self.waiting if r.place == room.place), default=0)
        room.had_bytes = self._tiers.freed.get(room.place, 0)
        room.until_bytes = max(last, room.had_bytes) + room.nbytes
        self.waiting.append(room)

    def serve(self, out: list[Instruction]) -> None:
        """Send down what is missing and not under way; resume those who have room, or for whom nothing more can go."""
        tiers = self._tiers
        for room in tuple(self.waiting):
            freed, leaving = tiers.freed.get(room.place, 0), tiers.leaving.get(room.place, 0)
            if (missing := room.until_bytes - freed - leaving) > 0:
                tiers.send_down(room.place, missing, missing, room, out)
                freed, leaving = tiers.freed.get(room.place, 0), tiers.leaving.get(room.place, 0)
            if freed >= room.until_bytes or not leaving:
                self.waiting.remove(room)
                out.append(Resume(room) if freed > room.had_bytes else Fail(room, None))
        if not self.waiting:
            tiers.freed.clear()
