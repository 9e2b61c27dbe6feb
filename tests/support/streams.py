"""Programs that are started with output that nobody has."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

# What stands behind a command in a shell; DEAD is a pipe whose reader has gone.
STREAMS = {
    "closed": "<&- >&- 2>&-",
    "full": ">/dev/full 2>/dev/full",
    "gone": ">&$DEAD 2>&$DEAD",
    "no-errors": "2>&-",
    "full-errors": "2>/dev/full",
}


def run(argv: Sequence[str], streams: str, env: Mapping[str, str], timeout: float = 120) -> int:
    """Run a program with one of :data:`STREAMS`, and return its exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = ["bash", "-c", f'exec "$@" {STREAMS[streams]}', "job", *argv]
        # what cannot be written is to be found at Python's end, too
        more = {**{k: v for k, v in env.items() if k != "PYTHONUNBUFFERED"}, "DEAD": str(writer)}
        null = subprocess.DEVNULL
        done = subprocess.run(words, env=more, pass_fds=[writer], timeout=timeout, stdin=null, stdout=null, stderr=null)
        return done.returncode
    finally:
        os.close(writer)
