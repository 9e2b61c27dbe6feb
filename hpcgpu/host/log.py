"""What people see on standard error. What cannot be written (a launcher is gone, a disk is full) stops nothing else."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Say something, on a line."""
    write(f"hpcgpu: {text}\n")


def write(text: str) -> None:
    """Write something at once."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        sys.stderr.write(text)
        sys.stderr.flush()


def flush() -> None:
    """Write what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
