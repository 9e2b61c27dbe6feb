"""Processes of others by pid and start time: is it there, has it ended. Imports next to nothing: a guard waits here."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator

# The variable by which ranks know the process that launched them.
LAUNCHER = "HPCGPU_LAUNCHER"


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot (proc(5), field 22); None without one, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:  # noqa: PTH123
            fields = f.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def mark(pid: int) -> str:
    """Return what names this process for :func:`find`, also after it has become another program."""
    return f"{os.uname().nodename} {pid} {start_time(pid)}"


def find(named: str) -> tuple[int, int] | None:
    """Return pid and start time of a process of this host that is there; None if it is not, or of another host."""
    host, _, rest = named.partition(" ")
    if host != os.uname().nodename:
        return None
    pid, started = (int(word) for word in rest.split())
    return (pid, started) if start_time(pid) == started else None


@contextlib.contextmanager
def watched(pid: int, started: int) -> Iterator[int | None]:
    """Hand out what becomes readable at its end, or None when it has ended; its pid cannot change hands inside."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield pidfd if start_time(pid) == started else None
    finally:
        os.close(pidfd)


def wait_for_end(pid: int, started: int) -> None:
    """Return when the process has ended."""
    with watched(pid, started) as pidfd:
        if pidfd is not None:
            select.select([pidfd], [], [])
