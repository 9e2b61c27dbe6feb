"""What a test leaves behind: processes, threads, descriptors, files. It fails for that, with their names.

Each test has a temporary folder and a home of its own. Whatever it starts has their paths in its environment, so that
processes are found which are no children of its any more, and not those of tests beside it.
"""

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

LIMIT_S = 30.0  # a job whose client is gone ends within 5 s, its guard a little later
# Threads of others that live as long as this process; each is made by the first who needs it.
POOLS = re.compile(
    r".*Dask-Default-Threads|Dask-Offload|Dask-Callback-Thread|TCP-Executor|AsyncProcess .* watch|Profile|asyncio_\d+"
    r"|ThreadPoolExecutor|hpcgpu-copies|hpcgpu-pinned|pyarrow|QueueFeeder|execnet|timeout"
)
# distributed does not remove the folder of its own processes, nor Open MPI 5 that of a killed mpirun, or of a process
# that starts MPI without one.
STAYS = re.compile(r"dask-scratch-space$|ompi\.")
# Descriptors of others that live as long as this process: devices, libraries, the loops of these threads.
KEPT = re.compile(r"/dev/|/proc/|/sys/|.*\.so")


def resources() -> dict[object, str]:
    """Return this process's threads, children, open files and listening sockets, each with its description."""
    return {
        **{t: f"thread {t.name}" for t in threading.enumerate() if not POOLS.match(t.name)},
        **{pid: f"child process {pid}: {command_line(pid)}" for pid in children()},
        **{(fd, target): f"descriptor {fd}: {target}" for fd, target in files()},
    }


def came_since(before: dict[object, str]) -> list[str]:
    return [text for resource, text in resources().items() if resource not in before]


def children() -> list[int]:
    """Return the processes that this one has started and that have not been waited for."""
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += map(int, path.read_text().split())
    return pids


def files() -> list[tuple[int, str]]:
    """Return this process's open files and listening sockets; a shared cluster's connections come and go."""
    descriptors = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if not KEPT.match(target) and (not target.startswith("socket:") or listens(int(link.name))):
                descriptors.append((int(link.name), target))
    return descriptors


def listens(descriptor: int) -> bool:
    """Tell whether a socket listens; the tables in /proc/net take 2 ms each to read."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        return bool(same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200].strip()
    return ""


def processes(places: list[Path]) -> dict[int, str]:
    """Return the processes in whose environment one of these folders stands, with their command lines."""
    names, pids = [os.fsencode(place) for place in places], []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                variables = environ(entry.path)
                pids += [int(entry.name)] if any(name in variables for name in names) else []
    return {pid: command_line(pid) for pid in pids}


def environ(process: str) -> bytes:
    """Return the environment of a process, given its folder in /proc; in the middle of exec(2) it has none yet."""
    end_s = time.monotonic() + 1
    while not (variables := Path(process, "environ").read_bytes()):
        Path(process, "exe").readlink()  # an error: a thread of the kernel, or a zombie
        if Path(process, "cmdline").read_bytes() or time.monotonic() > end_s:
            break
        time.sleep(0.001)
    return variables


def names(folder: Path) -> list[str]:
    """Return what lies in a temporary folder."""
    return [path.name for path in sorted(folder.iterdir()) if not STAYS.match(path.name)]


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """See that nothing is left of threads, children, open files and sockets."""
    before = resources()
    yield
    left = settled(lambda: came_since(before))
    assert not left, f"left behind: {'; '.join(left)}"


@contextlib.contextmanager
def no_process_left(home: Path) -> Iterator[Path]:
    """Have a temporary folder that is this test's own; see that nothing is left in it, and no process that knows it."""
    folder, was = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp")), os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield folder
        places = [folder, home]
        left = settled(lambda: [*(f"process {pid}: {line}" for pid, line in processes(places).items()), *names(folder)])
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
    while remaining := left():
        gc.collect()  # each time: what ends meanwhile may leave more of it
        if not (remaining := left()) or time.monotonic() > end_s:
            break
        time.sleep(0.1)
    return remaining


def signal_all(pids: Iterable[int], sig: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
