"""Write messages to standard error; one that cannot be written (no launcher, full disk) stops nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

_NOWHERE = (OSError, ValueError, AttributeError)  # the stream is gone or full; closed; absent (``2>&-``)
_logged: set[str] = set()  # by say_once, in this process


def say(text: str) -> None:
    """Write one line to standard error."""
    write(f"hpcgpu: {text}\n")


def say_once(text: str) -> None:
    """Write one line to standard error, once in this process."""
    if text not in _logged:
        _logged.add(text)
        say(text)


def say_of(node: str, lines: Iterable[str]) -> None:
    """Write a node's messages, one a line; empty ones are left out."""
    for line in filter(None, lines):
        say(f"{node}: {line}")


def write(text: str) -> None:
    """Write a text and flush."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except _NOWHERE:
        pass


def flush() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except _NOWHERE:
            pass


def is_terminal() -> bool:
    """Return whether standard error is a terminal, where lines can change in place."""
    try:
        return sys.stderr.isatty()
    except _NOWHERE:
        pass
    return False


def open_missing() -> None:
    """Open standard streams that were closed at the start (``>&-``): no other file may get their numbers."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, fd) if null != fd else os.set_inheritable(fd, True)
            if null != fd:
                os.close(null)
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


def finish() -> None:
    """Flush stdout and stderr, and drop output that cannot be written: else Python exits with code 120."""
    for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except _NOWHERE:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
                stream.flush()
            except _NOWHERE:
                pass
