"""The work of a thread for the stores of this process: its copies, and its waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from hpcgpu.spill.state.units import Copy, FailedAllocation, Ticket

# Takes pairs of executor and copy; None wakes the thread. Several stores use a thread's inbox.
Inbox = SimpleQueue[Any]


class _ThisThread(threading.local):
    """The state of a thread."""

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()  # takes its copies
        self.copies_down = 0  # those that it is in the middle of
        self.spills = False  # it is the spill thread of a store


this_thread = _ThisThread()


def drain(inbox: Inbox) -> Iterator[Copy]:
    """Take the copies out of an inbox, without waiting."""
    with contextlib.suppress(Empty):
        while True:
            if (got := inbox.get_nowait()) is not None:
                yield got[1]


def become_spill_thread(inbox: Inbox) -> None:
    """Make this thread the spill thread that reads an inbox."""
    this_thread.inbox, this_thread.spills = inbox, True


@dataclass(slots=True, eq=False)
class ThreadTicket(Ticket):
    """A ticket with its thread's inbox, the number of copies sent there and taken out, and its end.

    Executor makes it in the thread that waits; only that thread changes ``taken``. ``sent`` changes under the store's
    lock. Another thread may set ``error``, then ``told``, and wake the waiting thread by its inbox.
    """

    inbox: Any = None
    sent: int = 0
    taken: int = 0
    told: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class ThreadAllocation(FailedAllocation):
    """An allocation that has failed, with its thread's inbox; attributes and threads as of :class:`ThreadTicket`."""

    inbox: Any = None
    sent: int = 0
    taken: int = 0
    told: bool = False
    error: Exception | None = None
    has_room: bool = False


def wait_for(waiter: ThreadTicket | ThreadAllocation) -> None:
    """Make the copies in the inbox until ``waiter`` is told; while it waits for room, copies up wait, too."""
    aside = []
    try:
        while not waiter.told:
            got = this_thread.inbox.get()
            if got is None:
                continue
            if type(waiter) is ThreadAllocation and got[1].to > got[1].source:
                aside.append(got)
            else:
                _make(got)
    finally:
        for got in aside:
            this_thread.inbox.put(got)


def make_sent(ticket: ThreadTicket) -> None:
    """Make the copies of a ticket that is over: other threads may wait for them, too."""
    try:
        while ticket.taken < ticket.sent:
            if (got := this_thread.inbox.get()) is not None:
                _make(got)
    except BaseException:  # Ctrl-C in one of them
        make_sent(ticket)
        raise


def not_made(allocation: ThreadAllocation) -> list[Copy]:
    """Take out the copies of an allocation that is over: this thread may never read its inbox again."""
    found, others = [], []
    while allocation.taken < allocation.sent:
        got = this_thread.inbox.get()
        if got is not None and got[1].by is allocation:
            allocation.taken += 1
            found.append(got[1])
        elif got is not None:
            others.append(got)
    for got in others:
        this_thread.inbox.put(got)
    return found


def _make(got: tuple[Any, Copy]) -> None:
    executor, copy = got
    if copy.by is not None:
        copy.by.taken += 1  # type: ignore[union-attr]
    executor.copy(copy)
