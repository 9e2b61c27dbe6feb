"""What people see on standard error. What cannot be written (a launcher is gone, a disk is full) stops nothing else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable


def say(text: str) -> None:
    """Say something, on a line."""
    write(f"hpcgpu: {text}\n")


def say_of(node: str, lines: Iterable[str]) -> None:
    """Say something of a node; empty lines say nothing."""
    for line in filter(None, lines):
        say(f"{node}: {line}")


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
