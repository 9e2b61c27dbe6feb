"""Sizes of values, by dask's ``sizeof``. This module imports dask, so the store imports it with the first value."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from dask.sizeof import sizeof

logger = logging.getLogger("distributed.worker.memory")
_UNKNOWN_BYTES = 1_000_000  # about what distributed takes when a sizeof fails (sizeof.py, 2026.8.0)


def size_of(value: Any) -> int:
    """Return the size of a value by dask's ``sizeof``; it does not raise."""
    try:
        return int(sizeof(value))
    except Exception:  # what a user's sizeof may raise; distributed does the same
        # as text: a log handler that keeps records would keep the frames, with the value in them
        why = traceback.format_exc()
        logger.warning("the size of a %s is taken for %d bytes: %s", type(value), _UNKNOWN_BYTES, why)
        return _UNKNOWN_BYTES
