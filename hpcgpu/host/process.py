"""Changes to the calling process: its death, its title, its random numbers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping

from hpcgpu.errors import LaunchError
from hpcgpu.host import log

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# What must stand in the environment before a rank's image starts: distributed's nanny sets the same for its
# workers (distributed.yaml, nanny.pre-spawn-environ), and OpenBLAS starts threads at import unless told not to.
_IMAGE_ENV = {
    "PYTHONHASHSEED": "6640",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_OURS = "HPCGPU_IMAGE_ENV"
_PRELOAD = "LD_PRELOAD"


def image_env(environ: Mapping[str, str], preload: str = "") -> dict[str, str]:
    """Return the variables to add for a rank; what is set already stays as it is.

    ``preload`` is a library that ld.so is to load before all others, and before those that the user has preloaded.
    """
    if _OURS in environ:
        return {}
    added = {name: value for name, value in _IMAGE_ENV.items() if name not in environ}
    if preload:
        added[_PRELOAD] = ":".join(filter(None, (preload, environ.get(_PRELOAD))))
    return {**added, _OURS: ",".join(added)}


def user_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as the user has it, without what :func:`image_env` added."""
    ours = {_OURS, *environ.get(_OURS, "").split(",")}
    theirs = {name: value for name, value in environ.items() if name not in ours}
    if _PRELOAD in ours and (rest := environ.get(_PRELOAD, "").partition(":")[2]):
        theirs[_PRELOAD] = rest
    return theirs


def execute(argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    """Become another program; does not return.

    Raises
    ------
    LaunchError
        There is no such program, or it is none.

    """
    log.flush()
    try:
        os.execve(argv[0], argv, dict(env))
    except OSError as e:
        raise LaunchError(f"the ranks could not be started ({e}): python and launcher say what starts them") from e


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without the garbage collector, and keep what is there out of its sight.

    It finds nothing among modules, and looks at all of them again and again: distributed is imported for three
    quarters of the CPU time (Python 3.11), and forks go on sharing the pages that it would write to.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent(parent: int, sig: signal.Signals) -> None:
    """Ask the kernel for ``sig`` when the parent's thread dies; exit at once if it is dead already.

    The setting is not inherited by children and follows the parent *thread* (prctl(2)): fork from the
    main thread. Without it the ranks lived on after SIGKILL of Open MPI 5.0.11's mpirun.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def outlast(sig: signal.Signals, seconds: int) -> None:
    """Die of ``sig`` only ``seconds`` later.

    A batch system that cancels a job signals every process of it. The leader is to end this one, in order, and
    until then it holds data that others may want. A forked child dies as usual, and so does a program.
    """
    signal.signal(sig, lambda *_: signal.alarm(seconds) and None)
    os.register_at_fork(after_in_child=functools.partial(signal.signal, sig, signal.SIG_DFL))


def hide_gpus(protocol: str) -> None:
    """Let this process, which computes nothing, see no GPU: UCX makes a CUDA context on the first one it sees."""
    if protocol == "ucx":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def set_title(title: str) -> None:
    """Name this thread for ps and top (15 characters are kept)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)


def reseed() -> None:
    """Give a forked child random numbers of its own where a library does not do so itself.

    The standard library's ``random`` does (os.register_at_fork); NumPy's global generator does not, and
    all workers of a node would draw the same numbers.
    """
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()


def call(entry: str, *args: object) -> int:
    """Call ``module:function``; its return value is the exit code."""
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name)
    return int(function(*args) or 0)


def alive(pid: int) -> bool:
    """Tell whether the process is there and not a zombie."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:  # noqa: PTH123
        return f.read().rpartition(")")[2].split()[0] != "Z"
    return False
