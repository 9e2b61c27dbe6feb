"""The read mode of a context: readers get handles for values that are not up, or get values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class ReadMode(NamedTuple):
    """Readers get handles; ``leaving``: also for values that are up, but must be read in a thread to be sent.

    ``to_worker``: they are sent to a worker. Immutable; GpuSpillBuffer makes it for a context.
    """

    to_worker: bool
    leaving: bool = False


_mode: ContextVar[ReadMode | None] = ContextVar("hpcgpu-read-mode", default=None)


# Returns the read mode of this context; None: readers get values. Each read asks, so it is no function in Python.
read_mode = _mode.get


@contextmanager
def reading(mode: ReadMode | None) -> Iterator[None]:
    """Set the read mode while inside."""
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)
