"""Lines for people on standard error."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Say something. What cannot be written (the launcher is gone, the disk is full) stops nothing else."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        print(f"hpcgpu: {text}", file=sys.stderr, flush=True)
