"""Sizes of values, by dask's ``sizeof``. dask is imported with the first value, not with the store."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("distributed.worker.memory")
_UNKNOWN_BYTES = 1_000_000  # about what distributed takes when a sizeof fails (sizeof.py, 2026.8.0)


@functools.cache
def _sizeof() -> Callable[[Any], int]:
    from dask.sizeof import sizeof

    return sizeof


def size_of(value: Any) -> int:
    """Return the size of a value by dask's ``sizeof``; it does not raise."""
    try:
        return int(_sizeof()(value))
    except Exception:  # of a user's sizeof; distributed catches all, too
        # as text: a log handler that keeps records would keep the frames, with the value in them
        why = traceback.format_exc()
        logger.warning("the size of a %s is taken for %d bytes: %s", type(value), _UNKNOWN_BYTES, why)
        return _UNKNOWN_BYTES
