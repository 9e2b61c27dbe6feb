"""Inboxes of threads: a value for a thread that waits is made in that thread."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from hpcgpu.spill.state.instructions import Copy, FailedAllocation, Ticket, Waiter

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
        self.released: list[Any] | tuple[()] = ()  # StoredObjects
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
