"""The last events of a state machine, to be replayed: names and sizes, and neither keys nor data."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

_EVENTS = 1000
_PER_LINE = 8  # so that lines have about 1,000 characters, as others write to the same log
MOST = 30  # units of an event; further ones are left out
FIELDS = ("name", "nbytes", "top", "at", "valid", "keys", "dirty", "age")
facts = attrgetter(*FIELDS)  # of a unit, before the event


class History:
    """The last events of one machine, each as its name, arguments and facts of units; under the store's lock."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        self._limits = limits  # as they are now
        self._events: deque[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = deque(maxlen=_EVENTS)
        self.add = self._events.append  # reading adds nothing: it only makes units younger
        self.add(("begin", tuple(limits.items()), ()))

    def lines(self) -> Iterator[str]:
        """Yield the events as lines of JSON, for ``scripts/replay_spill.py``."""
        events = [*self._events, ("end", tuple(self._limits.items()), ())]
        for i in range(0, len(events), _PER_LINE):
            yield json.dumps(events[i : i + _PER_LINE], separators=(",", ":"), default=str)
