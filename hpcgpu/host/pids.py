"""Other processes, by pid and start time: whether they live. It imports very little: the guard waits here."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# The variable that tells ranks the process that launched them.
LAUNCHER = "HPCGPU_PARENT_PROCESS"  # no option has this name: it would be taken for one


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot (proc(5), field 22); None without one, or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:  # noqa: PTH123
            fields = f.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def mark(pid: int) -> str:
    """Return the identity of this process for :func:`find`, which stays after exec."""
    return f"{os.uname().nodename} {pid} {start_time(pid)}"


def find(named: str) -> tuple[int, int] | None:
    """Return pid and start time of a living process of this host; None if it has ended, or is of another host."""
    host, _, rest = named.partition(" ")
    if host != os.uname().nodename:
        return None
    pid, started = (int(word) for word in rest.split())
    return (pid, started) if start_time(pid) == started else None


def is_over(named: str) -> bool:
    """Tell whether it is an ended process of this host."""
    return named.partition(" ")[0] == os.uname().nodename and find(named) is None


@contextlib.contextmanager
def watched(pid: int, started: int) -> Iterator[int | None]:
    """Yield a descriptor that becomes readable at its end, or None if it has ended; its pid is not reused meanwhile."""
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
    """Wait until the process has ended, for ``limit_s`` seconds at most."""
    with watched(pid, started) as pidfd:
        if pidfd is not None:
            select.select([pidfd], [], [], limit_s)


class Process(NamedTuple):
    """A process of this user on this host.

    Attributes
    ----------
    state : str
        The kernel's letter: ``R``, ``S``, ``D``, ``T`` ... (proc(5)).
    title : str
        Of its first thread, 15 characters at most.
    environ : dict
        As it was started with.

    """

    pid: int
    parent: int
    started: int
    state: str
    title: str
    environ: dict[str, str]


def own(among: Iterable[str] | None = None) -> Iterator[Process]:
    """Yield the processes of this user on this host that can be inspected: all, or those ``among`` these pids."""
    for name in filter(str.isdigit, os.listdir("/proc")) if among is None else among:  # noqa: PTH208
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():  # noqa: PTH116
                yield _read(int(name))
        except OSError:
            continue  # it has just ended, or is closed to us


def siblings() -> Iterator[Process]:
    """Yield, of :func:`own`, those with the parent of this process, in the order of their start.

    It yields none where the kernel does not list children (CONFIG_PROC_CHILDREN, proc(5)).
    """
    parent = f"/proc/{os.getppid()}/task"
    with contextlib.suppress(OSError):
        for thread in os.listdir(parent):  # noqa: PTH208
            with open(f"{parent}/{thread}/children", encoding="ascii") as f:  # noqa: PTH123
                yield from own(f.read().split())


def title(pid: int) -> str:
    """Return the title of a process; empty: it has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as f:  # noqa: PTH123
            return f.read().rstrip("\n")
    except OSError:
        return ""


def _read(pid: int) -> Process:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as f:  # noqa: PTH123
        head, _, tail = f.read().rpartition(")")
    with open(f"/proc/{pid}/environ", "rb") as f:  # noqa: PTH123
        words = f.read().decode(errors="surrogateescape").split("\0")
    fields = tail.split()
    environ = dict(word.split("=", 1) for word in words if "=" in word)
    return Process(pid, int(fields[1]), int(fields[19]), fields[0], head.partition("(")[2], environ)
