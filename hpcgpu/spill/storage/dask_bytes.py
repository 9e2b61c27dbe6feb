"""How big things are, as dask says, and how they become bytes, as distributed does it."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

from dask.sizeof import sizeof

logger = logging.getLogger("distributed.worker.memory")
_UNKNOWN_BYTES = 1_000_000  # about what distributed takes when a sizeof fails (sizeof.py, 2026.8.0)

# In the thread that spills: distributed logs what cannot be pickled with its whole text, which may be as long as the
# memory is full (pickle.py, 2026.8.0). The store names the type, once.
_own_words = threading.local()


def _is_for_others(_: logging.LogRecord) -> bool:
    return not getattr(_own_words, "there", False)


def size_of(value: Any) -> int:  # noqa: ANN401
    """Return the size of a value as dask says; it does not raise."""
    try:
        return int(sizeof(value))
    except Exception:  # what a user's sizeof may raise; distributed does the same
        logger.warning("the size of a %s is taken for %d bytes", type(value), _UNKNOWN_BYTES, exc_info=True)
        return _UNKNOWN_BYTES


def dumps(value: Any, buffer_callback: Callable[[pickle.PickleBuffer], object]) -> bytes:  # noqa: ANN401
    """Pickle a value; one of a class that came by value from a client's script as distributed does for peers."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        out = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception:  # whatever a user's __reduce__ raises; distributed's pickle does the same
        from distributed.protocol import pickle as by_value

        buffers.clear()
        _own_words.there = True
        by_value.logger.addFilter(_is_for_others)
        try:
            out = by_value.dumps(value, buffer_callback=buffers.append)
        finally:
            _own_words.there = False
    for buffer in buffers:
        buffer_callback(buffer)
    return out
