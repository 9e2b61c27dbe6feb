"""The lock of the store, and of its parts: a leaf, which is never held while another one is taken."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable

from hpcgpu.errors import SpillError

_LOCKS: list[weakref.ref[LeafLock]] = []


class ReenteredError(SpillError):
    """A thread calls a store while it is inside a store; the next try may succeed."""

    def __init__(self) -> None:
        super().__init__(
            "the spill store is in use by this thread: a __del__ that the garbage collector runs, or a signal handler, "
            "reads, stores or deletes a value during another such call"
        )


class LeafLock(_thread.RLock):  # type: ignore[misc] # final for type checkers only
    """A lock that raises instead of waiting for its own thread. Any thread may take it.

    The garbage collector runs a user's __del__ wherever Python code runs, and signals run their handlers: also in a
    thread that has the lock. A touch of a proxy there would wait for its own thread for ever. It is one of Python's own
    locks, since an __exit__ in Python would double its time.
    """

    _is_owned: Callable[[], bool]  # threading.Condition calls it, too

    def __init__(self) -> None:
        _LOCKS.append(weakref.ref(self, _LOCKS.remove))

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():
            raise ReenteredError
        return self.acquire()

    @property
    def is_mine(self) -> bool:
        """True if the calling thread has it."""
        return self._is_owned()


def is_inside() -> bool:
    """Tell whether the calling thread has the lock of any store: then it must not wait for other threads."""
    return any(lock.is_mine for each in tuple(_LOCKS) if (lock := each()) is not None)
