"""The work of a thread for the stores of this process: its copies, its waits, the work after events, its log lines."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from hpcgpu.errors import SpillError, message_of
from hpcgpu.spill.state import DISK, HOST, Copy, FailedAllocation, Say, Ticket, Waiter
from hpcgpu.spill.values.unit import ABSENT, Content, ProxiedObject
from hpcgpu.units import format_bytes

# Takes pairs of executor and copy; None wakes the thread. Several stores use a thread's inbox.
Inbox = SimpleQueue[Any]


class _ThisThread(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()  # takes its copies
        self.copies_down = 0  # the number of copies down that it is making
        self.spills = False  # it is the spill thread of a store


this_thread = _ThisThread()


def drain(inbox: Inbox) -> Iterator[Copy]:
    """Take the copies out of an inbox, without waiting."""
    with contextlib.suppress(Empty):
        while True:
            if (item := inbox.get_nowait()) is not None:
                yield item[1]


@dataclass(slots=True)
class Count:
    """Moves in one direction and their seconds; changed under the store's lock, read without it."""

    nbytes: int = 0
    number: int = 0
    seconds: float = 0.0


class Todo:
    """The work of a thread after an event, without the lock: it frees memory, then carries out instructions."""

    __slots__ = ("garbage", "instructions", "released")

    def __init__(self) -> None:
        self.garbage: list[Any] = []
        self.released: list[ProxiedObject] | tuple[()] = ()
        self.instructions: deque[Any] | tuple[()] = ()


def wait_for(waiter: Waiter) -> None:
    """Make the copies in the inbox until ``waiter`` is answered; while it waits for room, copies up wait, too."""
    aside = []
    try:
        while not waiter.answered:
            if (item := this_thread.inbox.get()) is None:
                continue
            if type(waiter) is FailedAllocation and item[1].to > item[1].source:
                aside.append(item)
            else:
                _make(item)
    finally:
        for item in aside:
            this_thread.inbox.put(item)


def make_sent(ticket: Ticket) -> None:
    """Make the copies of a ticket that is over: other threads may wait for them, too."""
    try:
        while ticket.taken < ticket.sent:
            if (item := this_thread.inbox.get()) is not None:
                _make(item)
    except BaseException:  # Ctrl-C in one of them
        make_sent(ticket)
        raise


def take_unmade(allocation: FailedAllocation) -> list[Copy]:
    """Take out the copies of an allocation that is over: this thread may never read its inbox again."""
    copies, others = [], []
    while allocation.taken < allocation.sent:
        item = this_thread.inbox.get()
        if item is not None and item[1].by is allocation:
            allocation.taken += 1
            copies.append(item[1])
        elif item is not None:
            others.append(item)
    for item in others:
        this_thread.inbox.put(item)
    return copies


def _make(item: tuple[Any, Copy]) -> None:
    executor, copy = item
    if copy.by is not None:
        copy.by.taken += 1
    executor.copy(copy)


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
        self._now = dict.fromkeys(_DOWN, (0, 0))
        self._before = self._now
        self._since_s = self._last_s = 0.0
        self._spilling = False

    def note(self, tiers: Mapping[str, int], counters: Mapping[str, Count], now_s: float) -> str | None:
        """Take the store's bytes and moves, after a move or :meth:`wait_s`; return a line for the log, or None."""
        now = {way: (counters[way].nbytes, counters[way].number) for way in _DOWN}
        moved, before, self._now = now != self._now, self._now, now
        if moved:
            self._last_s = now_s
            if self._spilling:
                return None
            self._spilling, self._since_s, self._before = True, now_s, before
            return f"spilling begins: {_format_moves(before, now)}; now {_format_tiers(tiers)}"
        if not self._spilling or now_s - self._last_s < self.quiet_s:
            return None
        self._spilling = False
        lasted_s, moves = self._last_s - self._since_s, _format_moves(self._before, now)
        return f"spilling has ended after {lasted_s:.0f} s: {moves}; now {_format_tiers(tiers)}"

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until :meth:`note` must be called even if there is no move; None: never."""
        return max(0.0, self._last_s + self.quiet_s - now_s) if self._spilling else None


def _format_moves(before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]) -> str:
    out = []
    for way in _DOWN:
        nbytes, number = (b - a for a, b in zip(before[way], now[way], strict=True))
        if number:
            moves = f"{number} move{'s' if number > 1 else ''}"
            out.append(f"{way.replace('_', ' ')} {format_bytes(nbytes)} in {moves}")
    return ", ".join(out)


def _format_tiers(tiers: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(size)} on {tier}" for tier, size in tiers.items())


def forget_frames(error: BaseException) -> None:
    """Remove the tracebacks of an error, and of the errors that led to it: their frames keep arrays."""
    seen: dict[int, None] = {}
    rest: list[BaseException | None] = [error]
    while rest:
        if (each := rest.pop()) is not None and id(each) not in seen:
            seen[id(each)] = None
            each.__traceback__ = None
            rest += [each.__cause__, each.__context__]


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
