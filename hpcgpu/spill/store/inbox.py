"""What a thread does for the stores of this process: its copies, and what it waits for."""

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
    """The state of a thread.

    Attributes
    ----------
    inbox : SimpleQueue
        Takes its copies.
    copies_down : int
        The number of copies down that it is in the middle of.
    spills : bool
        It is the spill thread of a store.

    """

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.copies_down = 0
        self.spills = False


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
