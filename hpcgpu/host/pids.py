"""Identify other processes by pid and start time, and watch them. It imports little: the guard waits here."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# The variable with the identity (mark) of the process that launched the ranks.
LAUNCHER = "HPCGPU_PARENT_PROCESS"  # not the name of an option: it would be read as one


def start_time(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot (proc(5), field 22); None for a zombie or no process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
            fields = f.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def mark(pid: int) -> str:
    """Return a process's identity for :func:`find`; it stays after exec."""
    return f"{os.uname().nodename} {pid} {start_time(pid)}"


def find(named: str) -> tuple[int, int] | None:
    """Return pid and start time of a marked process; None if it has ended or is on another host."""
    host, _, rest = named.partition(" ")
    if host != os.uname().nodename:
        return None
    pid, started = (int(word) for word in rest.split())
    return (pid, started) if start_time(pid) == started else None


def is_over(named: str) -> bool:
    """Return whether the marked process was on this host and has ended."""
    return named.partition(" ")[0] == os.uname().nodename and find(named) is None


@contextlib.contextmanager
def watched(pid: int, started: int) -> Iterator[int | None]:
    """Yield a descriptor that is readable at the process's end, None if it has ended; the pid is not reused."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield pidfd if start_time(pid) == started else None
    finally:
        os.close(pidfd)


def wait_for_end(pid: int, started: int, limit_s: float | None = None) -> None:
    """Wait until the process ends, ``limit_s`` seconds at most."""
    with watched(pid, started) as pidfd:
        if pidfd is not None:
            select.select([pidfd], [], [], limit_s)


class Process(NamedTuple):
    """A process of this user on this host."""

    pid: int
    parent: int
    started: int
    state: str  # the kernel's letter: R, S, D, T ... (proc(5))
    title: str  # of its first thread, 15 characters at most
    environ: dict[str, str]  # at its start


def user_processes(among: Iterable[str] | None = None) -> Iterator[Process]:
    """Yield this user's processes on this host that can be inspected: all, or those ``among`` these pids."""
    for name in filter(str.isdigit, os.listdir("/proc")) if among is None else among:
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                yield _read(int(name))
        except OSError:
            continue  # it has just ended, or is closed to us


def siblings() -> Iterator[Process]:
    """Yield this user's processes with this one's parent, in order of start; none without CONFIG_PROC_CHILDREN."""
    parent = f"/proc/{os.getppid()}/task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(parent):
            with open(f"{parent}/{thread}/children", encoding="ascii") as f:
                yield from user_processes(f.read().split())


def title(pid: int) -> str:
    """Return a process's title; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as f:
            return f.read().rstrip("\n")
    except OSError:
        return ""


def _read(pid: int) -> Process:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:
        head, _, tail = f.read().rpartition(")")
    with open(f"/proc/{pid}/environ", "rb") as f:
        variables = f.read().decode(errors="surrogateescape").split("\0")
    fields = tail.split()
    environ = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    return Process(pid, int(fields[1]), int(fields[19]), fields[0], head.partition("(")[2], environ)
