"""The lock of the store, and of its parts: a leaf that no thread takes twice."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable

from hpcgpu.errors import SpillError


class ReenteredError(SpillError):
    """A thread asks a store for something while it is inside a store; the next try may succeed.

    Immutable; raised in that thread.
    """

    def __init__(self) -> None:
        super().__init__(
            "the spill store is in use by this very thread: a __del__ that the garbage collector runs, or a signal "
            "handler, asks for a stored value, or stores or deletes one, in the middle of another such call"
        )


class LeafLock(_thread.RLock):  # type: ignore[misc] # final for type checkers only
    """A lock that raises in place of waiting for its own thread.

    The garbage collector runs a ``__del__`` of a user's wherever Python code runs, and signals run their handlers: also
    in a thread that has the lock. If that touched a proxy, it would wait for its own thread for ever.

    Any thread may take it. It is one of Python's own locks, since an ``__exit__`` in Python would take as long again.
    """

    _is_owned: Callable[[], bool]  # threading.Condition asks it, too

    def __init__(self) -> None:
        _LOCKS.append(weakref.ref(self, _LOCKS.remove))

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():
            raise ReenteredError
        return self.acquire()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has it."""
        return self._is_owned()


_LOCKS: list[weakref.ref[LeafLock]] = []


def is_inside() -> bool:
    """Tell whether the calling thread has such a lock, of any store: then it must not wait for other threads."""
    return any(lock.is_mine for each in tuple(_LOCKS) if (lock := each()) is not None)
