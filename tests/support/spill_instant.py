"""A store whose copies end at once: the state machine alone, and the bytes that it moves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from hpcgpu.spill.state.accounting import Choice
from hpcgpu.spill.state.machine import SpillState
from hpcgpu.spill.state.policy import victims
from hpcgpu.spill.state.units import Copy, Instruction, Ticket, Unit


class Instant:
    """Carries out what the machine instructs."""

    def __init__(self, limits: Mapping[int, int], choose: Choice = victims, low: float = 0.95) -> None:
        self.state = SpillState(limits, low, choose)
        self.up = self.down = 0
        self.told: list[Instruction] = []
        self.copies: Counter[Unit] = Counter()

    def run(self, instructions: Iterable[Instruction]) -> None:
        todo = deque(instructions)
        while todo:
            do = todo.popleft()
            if not isinstance(do, Copy):
                self.told.append(do)
                continue
            self.copies[do.unit] += 1
            if do.to > do.source:
                self.up += do.unit.nbytes
            else:
                self.down += do.unit.nbytes
            todo.extend(self.state.moved(do))

    def set(self, *units: Unit) -> None:
        """Let each unit have a key, its name."""
        for unit in units:
            self.run(self.state.set(unit.name, (unit,)))

    def use(self, *units: Unit, writes: bool = False) -> None:
        """Use units as a task does."""
        ticket = Ticket(units, writes)
        self.run(self.state.need(ticket))
        self.run(self.state.release(ticket))
