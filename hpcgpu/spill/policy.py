"""Which unit goes down next. Pure: candidates in, choice out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple


class Candidate(NamedTuple):
    """A unit that may be moved.

    Attributes
    ----------
    age : int
        When it was last touched; smaller is longer ago.
    pinned : bool
        A running task uses it.
    needed : int
        How soon a task needs it: 0 nobody known, 1 one that is ready, 2 one that runs.
    clean : bool
        A valid copy lies below: moving it costs nothing.

    """

    name: int
    age: int
    nbytes: int
    pinned: bool = False
    needed: int = 0
    clean: bool = False


def victims(candidates: Iterable[Candidate], need_bytes: int) -> Iterator[Candidate]:
    """Yield what to move until ``need_bytes`` are covered: longest untouched first, of equal age the biggest.

    ``candidates`` come in the order of their age. What is pinned is never chosen: moving it would free nothing.
    """
    for _, equals in groupby(candidates, key=lambda c: c.age):
        for candidate in sorted(equals, key=lambda c: -c.nbytes):
            if need_bytes <= 0:
                return
            if not candidate.pinned:
                need_bytes -= candidate.nbytes
                yield candidate
