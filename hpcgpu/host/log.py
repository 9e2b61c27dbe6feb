"""Messages on standard error. A message that cannot be written (no launcher, full disk) stops nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

_NOWHERE = (OSError, ValueError, AttributeError)  # it is gone or full; closed; not there (``2>&-``)


def say(text: str) -> None:
    """Write a message on a line of its own."""
    write(f"hpcgpu: {text}\n")


def say_of(node: str, lines: Iterable[str]) -> None:
    """Write a message about a node; empty lines are left out."""
    for line in filter(None, lines):
        say(f"{node}: {line}")


def write(text: str) -> None:
    """Write a text at once."""
    with contextlib.suppress(*_NOWHERE):
        sys.stderr.write(text)
        sys.stderr.flush()


def flush() -> None:
    """Flush what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(*_NOWHERE):
            stream.flush()


def is_terminal() -> bool:
    """Tell whether standard error is a terminal on which lines can change in place."""
    with contextlib.suppress(*_NOWHERE):
        return sys.stderr.isatty()
    return False


def open_missing() -> None:
    """Open the standard streams that a program was started without (``>&-``): no other file gets their numbers then."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, fd) if null != fd else os.set_inheritable(fd, True)
            if null != fd:
                os.close(null)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: PTH123, SIM115


def finish() -> None:
    """Flush what was printed, and drop what cannot be written: otherwise Python ends with exit code 120."""
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except _NOWHERE:
            with contextlib.suppress(*_NOWHERE):
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
                stream.flush()
