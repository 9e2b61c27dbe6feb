"""Lines about spilling for the worker's log: one when it begins and one when it has ended, not one for each move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcgpu.units import format_bytes

if TYPE_CHECKING:
    from hpcgpu.spill.store.todo import Count

_DOWN = ("device_to_host", "host_to_disk")


class SpillLog:
    """Hysteresis over the counters of a store.

    Not thread-safe: SpillThread makes it, and only the spill thread calls it. Spilling has ended when nothing has moved
    down for ``quiet_s``: a working set above a limit comes and goes with every task.
    """

    def __init__(self, quiet_s: float = 10.0) -> None:
        self.quiet_s = quiet_s
        self._seen = dict.fromkeys(_DOWN, (0, 0))
        self._before = self._seen
        self._since_s = self._last_s = 0.0
        self._spilling = False

    def note(self, tiers: Mapping[str, int], counters: Mapping[str, Count], now_s: float) -> str | None:
        """Take the store's numbers after a move, or after :meth:`wait_s`; return a line for the log, or None."""
        now = {way: (counters[way].nbytes, counters[way].number) for way in _DOWN}
        moved, before, self._seen = now != self._seen, self._seen, now
        if moved:
            self._last_s = now_s
            if self._spilling:
                return None
            self._spilling, self._since_s, self._before = True, now_s, before
            return f"spilling begins: {_moves(before, now)}; now {_held(tiers)}"
        if not self._spilling or now_s - self._last_s < self.quiet_s:
            return None
        self._spilling = False
        lasted_s = self._last_s - self._since_s
        return f"spilling has ended after {lasted_s:.0f} s: {_moves(self._before, now)}; now {_held(tiers)}"

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until :meth:`note` must be called even if nothing moves; None: never."""
        return max(0.0, self._last_s + self.quiet_s - now_s) if self._spilling else None


def _moves(before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> str:
    out = []
    for way in _DOWN:
        nbytes, number = (b - a for a, b in zip(before[way], now[way], strict=True))
        if number:
            moves = f"{number} move{'s' if number > 1 else ''}"
            out.append(f"{way.replace('_', ' ')} {format_bytes(nbytes)} in {moves}")
    return ", ".join(out)


def _held(tiers: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in tiers.items())
