"""Identify processes by pid and start time, and change this one: environment, title, limits, and its end.

Together: every rank needs all of it at its start, and a module more is an import more.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import os
import re
import resource
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping

from hpcgpu.errors import LaunchError, opt, plain
from hpcgpu.host import log
from hpcgpu.light_typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from threading import Event

# The variable with the identity (mark) of the process that launched the ranks.
LAUNCHER = "HPCGPU_PARENT_PROCESS"  # not the name of an option: it would be read as one
_PR_SET_PDEATHSIG = 1
_OPEN_FILES = 1 << 19
# glibc keeps free blocks of up to 4 MiB, and 16 MiB of free heap. distributed's nanny sets a MALLOC_TRIM_THRESHOLD_ of
# 65536: then each block from 128 KiB on is mapped anew, a page fault for each 4 KiB, a quarter of a p2p shuffle's time.
# From 4 MiB on numpy asks for huge pages, which are cheap to map. Where memory is short the heap is trimmed.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(16 << 20), "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}
_OF_LOCAL_CLUSTER = "MALLOC_TRIM_THRESHOLD_", "65536"
# Variables that must be set before a rank's fork server starts. distributed's nanny sets the others for its workers
# (distributed.yaml, nanny.pre-spawn-environ), and OpenBLAS starts threads at its import by default.
_RANK_ENV = {
    "PYTHONHASHSEED": "6640",
    **_MALLOC,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_OURS = "HPCGPU_RANK_ENV"
_PRELOAD = "LD_PRELOAD"
_THREADS = "OMP_NUM_THREADS"
_COPY = r"/.*/hpcgpu-stage-\d+-[^/]+/root(/.+)"
_LOOK_S = 0.05


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
    """Yield a descriptor that is readable at the process's end, None if it has ended; the pid is not reused.

    Kernels before 5.3 (RHEL 8) have no pidfd, nor have Pythons that were built on them, and containers may refuse it:
    there a thread looks, and the pid may be reused.
    """
    from threading import Event

    left = Event()
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    except (OSError, AttributeError):
        end = _polled(pid, started, left)
    try:
        yield end if start_time(pid) == started else None
    finally:
        left.set()
        os.close(end)


def _polled(pid: int, started: int, left: Event) -> int:
    """Return the end of a pipe that a thread closes at the process's end, or once ``left`` is set."""
    from threading import Thread

    end, kept = os.pipe()

    def look() -> None:
        with open(kept, "wb"):
            while start_time(pid) == started and not left.wait(_LOOK_S):
                pass

    Thread(target=look, daemon=True).start()
    return end


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


def children(parent: int) -> Iterator[Process]:
    """Yield this user's processes with this parent, in order of start; none without CONFIG_PROC_CHILDREN."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as f:
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


def rank_env(environ: Mapping[str, str], preload: str = "") -> dict[str, str]:
    """Return the variables to add for a rank; a user's values stay.

    PBS sets OMP_NUM_THREADS to the cores of the whole job on its node (NCPUS, OpenPBS 23.06.06), and each worker would
    take that number: it is replaced. ``preload`` is a library that ld.so loads before all others, also before the
    user's.
    """
    if _OURS in environ:
        return {}
    of_pbs = _THREADS if "PBS_JOBID" in environ and environ.get(_THREADS) == environ.get("NCPUS", "") else ""
    # A LocalCluster leaves its value in the process that has made it, and in all that this process starts.
    users = {name for name, value in environ.items() if (name, value) != _OF_LOCAL_CLUSTER}
    stay = users | (_MALLOC.keys() if _MALLOC.keys() & users else set())  # one of the two changes both
    added = {name: value for name, value in _RANK_ENV.items() if name not in stay or name == of_pbs}
    if preload:
        added[_PRELOAD] = ":".join(filter(None, (preload, environ.get(_PRELOAD))))
    ours = (f"{name}={environ[name]}" if name == of_pbs else name for name in added)
    return {**added, _OURS: ",".join(ours)}


def replaced(environ: Mapping[str, str], workers: Mapping[str, str]) -> tuple[str, ...]:
    """Return messages on variables that :func:`rank_env` replaced and the user does not set for ``workers``."""
    entries = (entry.partition("=") for entry in environ.get(_OURS, "").split(","))
    return tuple(
        f"{name}={old} is the batch system's, for the whole job: each worker has {_RANK_ENV[name]} "
        f"({plain(opt('env'))} changes it)"
        for name, is_old, old in entries
        if is_old and old != _RANK_ENV[name] and name not in workers
    )


def user_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment, without what :func:`rank_env` added."""
    before = {name: old for name, _, old in (e.partition("=") for e in environ.get(_OURS, "").split(","))}
    ours = {_OURS, *before}
    theirs = {name: value for name, value in environ.items() if name not in ours}
    theirs |= {name: old for name, old in before.items() if old}
    if _PRELOAD in ours and (rest := environ.get(_PRELOAD, "").partition(":")[2]):
        theirs[_PRELOAD] = rest
    return theirs


def execute(argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Become another program by exec; raise LaunchError if it does not exist or is not executable."""
    log.flush()
    try:
        os.execve(argv[0], argv, dict(env))
    except OSError as e:
        raise LaunchError(f"the ranks could not be started ({e}): python and launcher say what starts them") from e


def original(python: str) -> str:
    """Return the Python of which this one is a node's copy for a while (stage.sh); others as they are."""
    match = re.fullmatch(_COPY, python)
    return match[1] if match else python


def python_argv(module: str, *arguments: str, python: str = "", safe: bool = True) -> tuple[str, ...]:
    """Return the command of a module of hpcgpu for ``python`` ("": this interpreter).

    It imports nothing from the current folder if ``safe`` (``-P``).
    """
    return (python or sys.executable, *(("-P",) if safe else ()), "-m", module, *arguments)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without the garbage collector, then freeze the imported objects.

    The collector frees nothing of modules, but scans them again and again: without it the import of distributed takes
    three quarters of the CPU time (Python 3.11), and forks share the pages that it would write to.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent(parent: int, sig: signal.Signals) -> None:
    """Ask the kernel for ``sig`` at the death of the parent's thread; exit at once if it is dead already.

    Children do not inherit this, and it follows the parent *thread* (prctl(2)): fork from the main thread. Without it
    the ranks lived on after SIGKILL of Open MPI 5.0.11's mpirun.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def outlast(sig: signal.Signals) -> None:
    """Let this process go on after ``sig``.

    A batch system that cancels a job signals all of its processes. The leader ends this one in order, or with itself;
    until then it holds data that others may need. Forked children and executed programs die at once.
    """
    signal.signal(sig, lambda *_: None)
    os.register_at_fork(after_in_child=functools.partial(signal.signal, sig, signal.SIG_DFL))


def hide_gpus(protocol: str) -> None:
    """Hide all GPUs from this process, which computes nothing: UCX makes a CUDA context on the first one it sees."""
    if protocol == "ucx":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def allow_open_files() -> None:
    """Raise this process's limit of open descriptors: 1024 is common, and connections exhaust it.

    The limit stays within systemd's hard one: some programs close every possible descriptor, and a container may allow
    2^30.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def set_title(title: str) -> None:
    """Name the first thread of this process for ps and top, by 15 characters at most; any thread may call it."""
    with open("/proc/self/comm", "w", encoding="utf-8") as f:
        f.write(title)


@contextlib.contextmanager
def titled(new_title: str) -> Iterator[None]:
    """Set the title within a block; other processes see it (:func:`user_processes`)."""
    before = title(os.getpid())
    set_title(new_title)
    try:
        yield
    finally:
        set_title(before)


def refused(error: BaseException) -> str:
    """Return a message if the kernel refuses a process, a thread (EAGAIN) or a file, or Dask its own; "" for others."""
    # dask 2026.8.0, at its import
    if isinstance(error, ValueError) and str(error).startswith("A dask config file at "):
        return f"{' '.join(str(error).split())}; correct it, or move it away (DASK_CONFIG names another folder)"
    number, is_of_file = getattr(error, "errno", None), getattr(error, "filename", None) is not None  # or of a port
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or (number == errno.EACCES and is_of_file):
        folders = plain(f"HOME, TMPDIR, {opt('local_directory')}, {opt('log_directory')}")
        return (
            f"a file could not be read or written on {os.uname().nodename}: {error}. Make room where it lies (df -h, "
            f"df -i, quota -s), or give a folder that you can write to ({folders})"
        )
    # For a thread Python has only a message (3.11 to 3.14).
    if number != errno.EAGAIN and "can't start new thread" not in str(error):
        return ""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limit = "any number" if most == resource.RLIM_INFINITY else most
    return (
        f"no further process or thread can be started on {os.uname().nodename} ({error}): this user may have {limit} "
        "(ulimit -u), and a job or container as many as its cgroup says (pids.max)"
    )
