"""Reports of the store: errors of copies, and lines in the log when spilling begins, ends and fails.

Together: this is all that a store tells people.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Collection, Mapping

from hpcgpu.errors import SpillError, chain_of, message_of
from hpcgpu.spill.state.instructions import DISK, HOST, Say
from hpcgpu.spill.store.inbox import Count
from hpcgpu.spill.values.unit import ABSENT, Content
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.worker.memory")
TIER_NAMES = {DISK: "disk", HOST: "host"}
# While copies fail, a tier may be above its limit and below it by turns, each second: one line a minute.
_AGAIN_S = 60.0
_DOWN = ("device_to_host", "host_to_disk")


class Reports:
    """Logs tiers that stay above their limits, and values that cannot move. Thread-safe, without the store's lock."""

    # as text: distributed's DequeHandler (2026.8.0) keeps 10,000 records, and an error keeps the arrays of its frames
    # two threads may call in another order than that of the instructions: ``stays`` has the present state

    def __init__(self, stays: Collection[int]) -> None:
        self._stays = stays
        self.trouble: dict[int, str] = {}  # by tier, why it stays above its limit, in one line
        self._last: dict[int, tuple[str, float]] = {}  # by tier, the last line, and its time
        self._unanswered: set[int] = set()  # tiers that were logged as above their limit, and not as below it since
        self._immovable_kinds: set[str] = set()

    def say(self, say: Say) -> None:
        """Log an event, unless it was logged before."""
        if say.event == "immovable":
            kind = getattr(say.error, "kind", "value")
            if say.error is not None and kind not in self._immovable_kinds:
                self._immovable_kinds.add(kind)
                verb = "pickled; such values stay in memory" if say.tier == HOST else "moved; such arrays stay there"
                logger.warning("a %s cannot be %s: %s", kind, verb, message_of(say.error))
        elif say.event == "stays":
            self._say_stays(say)
        elif say.tier not in self._stays:
            self.trouble.pop(say.tier, None)
            if say.tier in self._unanswered:
                self._unanswered.discard(say.tier)
                logger.info("the %s tier is below its limit again", tier_name(say.tier))

    def _say_stays(self, say: Say) -> None:
        why = "the files on disk have reached their limit (max_spill)"
        if (error := say.error) is not None:
            why = message_of(error) or type(error).__name__
        if say.tier in self._stays:
            self.trouble[say.tier] = why
        last, last_s = self._last.get(say.tier, ("", 0.0))
        if why == last and time.monotonic() - last_s < _AGAIN_S:
            return
        self._last[say.tier] = why, time.monotonic()
        self._unanswered.add(say.tier)
        size, name = format_bytes(say.nbytes), tier_name(say.tier)
        logger.warning("%s stay in the %s tier, since they cannot be moved down: %s", size, name, why)


def tier_name(tier: int) -> str:
    """Return the name of a tier in messages."""
    return TIER_NAMES.get(tier, "device")


def describe(unit: Content) -> str:
    """Return the keys of the values that a lost unit is a part of, for a message."""
    keys = [repr(entry.key) for entry in tuple(unit.entries) if entry.key is not ABSENT]
    kind = unit.contents[0].kind_of(0).__name__ if unit.contents else "value"
    return f"the value of {', '.join(keys) or f'a {kind}'}"


class SpillLog:
    """Lines about spilling, for the spill thread: when it begins, and ``quiet_s`` after the last move down."""

    def __init__(self, quiet_s: float = 10.0) -> None:
        self.quiet_s = quiet_s
        self._now = self._before = dict.fromkeys(_DOWN, (0, 0))  # bytes and number of moves: last, and at the beginning
        self._since_s: float | None = None  # the beginning; None: no move is recent
        self._last_s = 0.0

    def note(self, tiers: Mapping[str, int], counters: Mapping[str, Count], now_s: float) -> str | None:
        """Take the store's bytes and moves, after a move or :meth:`wait_s`; return a line for the log, or None."""
        before, self._now = self._now, {way: (counters[way].nbytes, counters[way].number) for way in _DOWN}
        if self._now != before:
            self._last_s = now_s
            if self._since_s is not None:
                return None
            self._since_s, self._before, event = now_s, before, "begins"
        elif self._since_s is not None and now_s - self._last_s >= self.quiet_s:
            event, self._since_s = f"has ended after {self._last_s - self._since_s:.0f} s", None
        else:
            return None
        moves = []
        for way in _DOWN:
            nbytes, number = (b - a for a, b in zip(self._before[way], self._now[way], strict=True))
            if number:
                moves.append(f"{way.replace('_', ' ')} {format_bytes(nbytes)} in {number} move{'s' * (number > 1)}")
        sizes = ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in tiers.items())
        return f"spilling {event}: {', '.join(moves)}; now {sizes}"

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until :meth:`note` must be called even if there is no move; None: never."""
        return None if self._since_s is None else max(0.0, self._last_s + self.quiet_s - now_s)


def forget_frames(error: BaseException) -> None:
    """Remove the tracebacks of an error, and of the errors that led to it: their frames keep arrays."""
    for each in chain_of(error):
        each.__traceback__ = None


def copy_error(error: Exception) -> Exception:
    """Return a copy of an error for one of its readers, since raising adds frames; a SpillError if no copy is equal."""
    try:
        made = copy.copy(error)
        is_equal = type(made) is type(error) and made is not error and str(made) == str(error)
    except Exception:  # classes of users
        is_equal = False
    if not is_equal:
        made = SpillError(f"a value cannot be read now: {error!r}")
        made.__cause__ = error
    elif error.__cause__ is not None:  # to set None would hide the context of the reader
        made.__cause__ = error.__cause__
    return made
