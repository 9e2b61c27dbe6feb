"""Publish the host memory of a simulated GPU in a file, so that other processes leave it out."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_COUNTER_BYTES = 8


class Usage:
    """A number of bytes in a file; its process writes it, others read it by :func:`read_usage_bytes`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as f:
            f.write(bytes(_COUNTER_BYTES))
            f.flush()
            self._counter = mmap.mmap(f.fileno(), _COUNTER_BYTES)

    def publish(self, nbytes: int) -> None:
        """Write the number."""
        self._counter[:] = nbytes.to_bytes(_COUNTER_BYTES, "little")


def read_usage_bytes(path: str | os.PathLike[str]) -> int:
    """Return the host memory that a simulated GPU of another process takes; 0 if there is none."""
    try:
        return int.from_bytes(Path(path).read_bytes(), "little")
    except OSError:
        return 0
