"""Page-locked host memory, which a GPU copies to and from by itself; of a bounded amount, and used again.

Locking pages is slow, about 5 GB/s (dask-cuda #98), so that what was locked once is kept. The driver takes the pages
in the thread that asks for them: under the memory policy of the worker, which is set before the worker starts threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from hpcgpu.spill.storage.pool import Loan, Pool

_S = TypeVar("_S")


class _PinnedLoan(Loan):
    """What an array in page-locked memory keeps alive."""

    __slots__ = ()


class PinnedPool(Pool):
    """A pool of page-locked buffers: arrays of shape (nbytes,) and dtype uint8.

    Any thread may call it, as every Pool. DriverCopies makes two: for what is copied in one, and for its stages.
    """

    loan = _PinnedLoan


def is_pinned(array: np.ndarray) -> bool:
    """Tell whether an array is one that a pool has given out, as a whole."""
    return isinstance(array.base, _PinnedLoan)


def pieces(nbytes: int, size: int) -> Iterator[slice]:
    """Divide so many bytes into pieces of a size; the last one may be smaller."""
    return (slice(start, min(start + size, nbytes)) for start in range(0, nbytes, size))


def pipelined(
    parts: Iterator[slice],
    stages: Sequence[_S],
    start: Callable[[_S, slice], None],
    finish: Callable[[_S, slice], None],
) -> None:
    """Send the parts through the stages in turn: each stage's part is finished before the next one starts there."""
    under_way: deque[tuple[_S, slice]] = deque()
    for i, part in enumerate(parts):
        if len(under_way) == len(stages):
            finish(*under_way.popleft())
        stage = stages[i % len(stages)]
        start(stage, part)
        under_way.append((stage, part))
    while under_way:
        finish(*under_way.popleft())
