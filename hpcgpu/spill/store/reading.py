"""How the store is read in a context: by somebody who takes handles, or by one who wants values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Reader(NamedTuple):
    """Who takes handles, and whether they are sent to a worker. Immutable; GpuSpillBuffer makes it for a context."""

    to_worker: bool


_reader: ContextVar[Reader | None] = ContextVar("hpcgpu-reader", default=None)


def reader() -> Reader | None:
    """Return who reads in this context; None: somebody who wants values."""
    return _reader.get()


@contextmanager
def reading(who: Reader | None) -> Iterator[None]:
    """Be read by ``who`` inside."""
    token = _reader.set(who)
    try:
        yield
    finally:
        _reader.reset(token)
