"""The last events of a state machine, to be replayed exactly: names and sizes, and neither keys nor data.

A story has parts. Each begins with the machine's facts, so that it can be replayed without what was before. The last
part and the one before it are kept. Facts take about a microsecond per unit, under the store's lock, so a part has four
events per unit or more. With too many units a part begins with ``cut``: it can be read only.

Events hold units. :meth:`History.lines` writes their names, which costs nothing while no story is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

STORY = "spill story of process"  # in a log, before a process's id and a line of its store's story
_EVENTS = 1000
_EVENTS_PER_UNIT = 4
_MOST_UNITS = 2500
_PER_LINE = 8  # so that lines have about 1,000 characters, as others write to the same log
# An event: its name, then arguments. Facts are rows of the same form; the first one is called "state".
Row = tuple[Any, ...]


def _name(unit: Any) -> Any:
    return getattr(unit, "name", None)


class History(list[Row]):
    """The events of the last part, after the facts with which it begins; all is under the store's lock."""

    def __init__(self, facts: Callable[[], Iterable[Row]], count: Callable[[], int]) -> None:
        self._facts, self._count = facts, count  # of the machine, and its units, now
        self.turn()

    def turn(self) -> None:
        """Begin the next part, between two events; to be called when it is longer than ``most``."""
        self._before, self[:] = [*self], self._now()
        self.most = len(self) + max(_EVENTS, _EVENTS_PER_UNIT * len(self))

    def lines(self) -> Iterator[str]:
        """Yield the events, and the facts at their end, as lines of JSON, for ``scripts/replay_spill.py``."""
        rows = [*self._before, *self, *self._now()]
        for i in range(0, len(rows), _PER_LINE):
            yield json.dumps(rows[i : i + _PER_LINE], separators=(",", ":"), default=_name)

    def _now(self) -> list[Row]:
        count = self._count()
        return [("cut", count)] if count > _MOST_UNITS else list(self._facts())
