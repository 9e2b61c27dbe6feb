"""What a thread has to do with the stores of this process: the copies that are its own, and what it waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from hpcgpu.spill.state.units import Copy, Room, Ticket

# Takes the executor and the copy; None: look whether you were told. Several stores use a thread's inbox.
Inbox = SimpleQueue[Any]


class _Here(threading.local):
    """What this thread is at.

    Attributes
    ----------
    inbox : SimpleQueue
        Takes its copies.
    copies_down : int
        It is in the middle of so many.
    spills : bool
        It is the spill thread of a store.

    """

    def __init__(self) -> None:
        self.inbox: Inbox = SimpleQueue()
        self.copies_down = 0
        self.spills = False


here = _Here()


def there_now(inbox: Inbox) -> Iterator[Copy]:
    """Take out the copies that an inbox has, without waiting."""
    with contextlib.suppress(Empty):
        while True:
            if (got := inbox.get_nowait()) is not None:
                yield got[1]


def become_spill_thread(inbox: Inbox) -> None:
    """Let this thread do what comes into an inbox."""
    here.inbox, here.spills = inbox, True


@dataclass(slots=True, eq=False)
class Reader(Ticket):
    """A ticket, its thread's inbox, the copies that were sent there and taken out, and what has come of it.

    Executor makes it in the thread that waits, which alone changes ``taken``. ``sent`` changes under the store's lock.
    Another thread may set ``error``, then ``told``, and wakes the one that waits by its inbox.
    """

    inbox: Any = None
    sent: int = 0
    taken: int = 0
    told: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Allocation(Room):
    """An allocation that has failed, in the thread that allocates; as :class:`Reader`, also its threads."""

    inbox: Any = None
    sent: int = 0
    taken: int = 0
    told: bool = False
    error: Exception | None = None
    has_room: bool = False
