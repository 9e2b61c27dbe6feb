"""The work that an event of the store leaves, and the counts of its moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from hpcgpu.spill.values.unit import ProxiedObject


@dataclass(slots=True)
class Count:
    """Moves in one direction, and the seconds that they took; changed under the store's lock, read without it."""

    nbytes: int = 0
    number: int = 0
    seconds: float = 0.0


class Todo:
    """The work of a thread after an event, without the lock: it frees memory, then carries out instructions in order.

    One thread fills it, and carries it out. Each call of the store makes one: so ``released`` and ``instructions`` are
    made only where there are some.
    """

    __slots__ = ("garbage", "instructions", "released")

    def __init__(self) -> None:
        self.garbage: list[Any] = []
        self.released: list[ProxiedObject] | tuple[()] = ()
        self.instructions: deque[Any] | tuple[()] = ()
