"""What a test leaves behind: processes, threads, descriptors, files. It fails for that, with their names."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from signals import signal_all

LIMIT_S = 30.0  # a job whose client is gone ends within 5 s, its guard a little later
# Threads of others that live as long as this process; each is made by the first who needs it.
POOLS = re.compile(
    r".*Dask-Default-Threads|Dask-Offload|Dask-Callback-Thread|TCP-Executor|AsyncProcess .* watch|Profile|asyncio_\d+"
    r"|ThreadPoolExecutor|pyarrow|QueueFeeder|execnet|timeout"
)
# distributed does not remove the folder of its own processes, nor Open MPI 5 that of a killed mpirun, or of a process
# that starts MPI without one.
STAYS = re.compile(r"dask-scratch-space$|ompi\.")
# Descriptors of others that live as long as this process: devices, libraries, the loops of these threads.
KEPT = re.compile(r"/dev/|/proc/|/sys/|.*\.so")


@dataclass(frozen=True)
class Before:
    """What is there before a test."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    files: frozenset[tuple[int, str]]

    @classmethod
    def now(cls) -> Before:
        return cls(frozenset(threading.enumerate()), frozenset(children()), frozenset(files()))

    def left(self) -> list[str]:
        """Return what has come since, and is still there."""
        threads = [t for t in threading.enumerate() if t not in self.threads and not POOLS.match(t.name)]
        return [
            *(f"thread {t.name}" for t in threads),
            *(f"child process {pid}: {words(pid)}" for pid in children() if pid not in self.children),
            *(f"descriptor {fd}: {what}" for fd, what in files() if (fd, what) not in self.files),
        ]


def children() -> list[int]:
    """Return the processes that this one has started and that have not been waited for."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def files() -> list[tuple[int, str]]:
    """Return the files that this process has open, and the sockets on which it listens."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            what = str(link.readlink())
            if not KEPT.match(what) and (not what.startswith("socket:") or listens(int(link.name))):
                found.append((int(link.name), what))
    return found


def listens(descriptor: int) -> bool:
    """Tell whether a socket listens; the tables in /proc/net take 2 ms each to read."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        return bool(same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200].strip()
    return ""


def processes(places: list[Path]) -> dict[int, str]:
    """Return the processes in whose environment one of these folders stands: this process has started their like."""
    wanted, found = [os.fsencode(place) for place in places], {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                given = environ(entry.path)
                if any(place in given for place in wanted):
                    found[int(entry.name)] = words(int(entry.name))
    return found


def environ(process: str) -> bytes:
    """Return the environment of a process, given its folder in /proc; in the middle of exec(2) it has none yet."""
    end_s = time.monotonic() + 1
    while not (found := Path(process, "environ").read_bytes()):
        Path(process, "exe").readlink()  # an error: a thread of the kernel, or a zombie
        if Path(process, "cmdline").read_bytes() or time.monotonic() > end_s:
            break
        time.sleep(0.001)
    return found


def names(folder: Path) -> list[str]:
    """Return what lies in a temporary folder."""
    return [path.name for path in sorted(folder.iterdir()) if not STAYS.match(path.name)]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """See that nothing is left of threads, children, open files and sockets."""
    before = Before.now()
    yield
    if left := settled(before.left):
        raise AssertionError(f"left behind: {'; '.join(left)}")


@contextlib.contextmanager
def no_process_left(home: Path) -> Iterator[Path]:
    """Have a temporary folder that is this test's own; see that nothing is left in it, and no process that knows it."""
    folder, was = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp")), os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield folder
        places = [folder, home]
        left = settled(lambda: [*(f"process {pid}: {what}" for pid, what in processes(places).items()), *names(folder)])
        signal_all(processes(places), signal.SIGKILL)
        settled(lambda: list(map(str, processes(places))))
        assert not left, f"left behind: {'; '.join(left)}"
    finally:
        tempfile.tempdir = None
        os.environ.pop("TMPDIR") if was is None else os.environ.update(TMPDIR=was)
        shutil.rmtree(folder, ignore_errors=True)


def settled(left: Callable[[], list[str]]) -> list[str]:
    """Return what is left when what was ending has ended."""
    end_s = time.monotonic() + LIMIT_S
    while found := left():
        gc.collect()  # each time: what ends meanwhile may leave more of it
        if not (found := left()) or time.monotonic() > end_s:
            break
        time.sleep(0.1)
    return found
