"""Private files: mode 0600, in folders of mode 0700 that this user owns, never through a link.

Here are the claims of GPUs, and the exit code of a run, which the launching process waits for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError
from hpcgpu.host import log, process

# On a shared file system, another node's file may appear so much later than the end of that node's process.
SEEN_S = 3.0
_LOOK_S = 0.2


# Path.glob calls a folder that cannot be read empty since Python 3.13, and Path.exists and is_dir what cannot be seen
# missing since 3.14.
def mode_of(path: Path) -> int:
    """Return the mode of a file or folder, 0 without one; OSError if that cannot be seen."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def files_in(folder: Path) -> list[Path]:
    """Return what a folder has, nothing if there is no such folder; OSError if that cannot be read."""
    return list(folder.iterdir()) if stat.S_ISDIR(mode_of(folder)) else []


def make_folder(path: Path) -> Path:
    """Make a folder and its parents, mode 0700; raise HpcGpuError if others can enter it, or it is a link."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise HpcGpuError(f"{path} must be a folder of yours with mode 0700: chmod 700 it, or remove it")
    return path


def open_new(path: Path) -> BinaryIO:
    """Open a new file of mode 0600 for writing; it replaces anything at the path, even a link or FIFO."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def write(path: Path, text: str, *, survives: bool = True) -> None:
    """Write a file atomically: a reader sees all of it or nothing; ``survives``: also after a crash of the node."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as f:
            f.write(os.fsencode(text))
            f.flush()
            if survives:
                os.fsync(f.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)  # of a full disk: the next write would meet it
        raise


def read(path: Path) -> str:
    """Return a private file's text; raise HpcGpuError if it is not private, OSError if it is absent or a link."""
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as f:
        # os.fdopen would leave the descriptor of a folder open
        facts = os.fstat(f.fileno())
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise HpcGpuError(f"{path} holds a secret, but it is not yours alone: owner or mode was changed")
        return f.read()


def user_folder(name: str) -> Path:
    """Return ``~/.hpcgpu/NAME``; raise LaunchError if the user has no home, as in some containers."""
    try:
        return Path.home() / ".hpcgpu" / name
    except RuntimeError:
        raise LaunchError(f"user {os.getuid()} has no home on {os.uname().nodename}: set HOME") from None


def expanded(path: str, setting: str) -> Path:
    """Expand ``~`` in a path; raise ConfigError, with the setting, if that user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{setting}: {path.partition('/')[0]} is no home of this machine; give the folder") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change a folder, as far as its file system has locks: the last one's changes stay."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # Lustre without -o flock
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def claim(*parts: object) -> int | None:
    """Take the name of these parts on this host; return a descriptor for :func:`release`, None if it is taken.

    It ends with the process, too. LaunchError without a place for the file.
    """
    import hashlib
    import tempfile

    # A lock of a byte, of the open file (fcntl_locking(2)), not of the process: that may have several workers.
    host, troubles = os.uname().nodename, []
    number = int.from_bytes(hashlib.sha256(repr((host, *parts)).encode()).digest()[:7], "big")
    for in_home in (True, False):  # which is read-only or has no locks: Lustre without -o flock
        descriptor = -1
        try:
            temporary = Path(tempfile.gettempdir(), f"hpcgpu-{os.getuid()}")
            path = make_folder(user_folder("user") if in_home else temporary) / "claims"
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, number, 1))
        except (OSError, HpcGpuError) as e:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(e, BlockingIOError):
                return None
            troubles.append(str(e))
        else:
            return descriptor
    raise LaunchError(
        f"no file can be locked on {host}, so no process can take a GPU for itself: {'; '.join(troubles)}. "
        "HOME or TMPDIR must be a folder of yours in which you can write"
    )


def release(descriptor: int) -> None:
    """Let another process take the name; called once."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, 0))  # children may have the open file, too
    os.close(descriptor)


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


def make_exit_file(run: str = "") -> Path:
    """Make a folder for this launch's exit code; return the file, which rank 0 writes, perhaps on another node."""
    import shutil
    import tempfile

    try:
        # the folder of a run goes with it, also if this process was killed
        base = make_folder(Path(run, "launches") if run and Path(run).is_dir() else user_folder("launches"))
        for old in base.iterdir():
            if process.is_over(old.name):  # of a killed launch of this host
                shutil.rmtree(old, ignore_errors=True)
        folder = make_folder(base / process.mark(os.getpid()))
    except (OSError, HpcGpuError):  # the home, which nodes share, is not writable
        folder = Path(tempfile.mkdtemp(prefix="hpcgpu-end-"))
    return folder / "exit"


def remove_exit_file(path: str) -> None:
    """Remove the exit file and its folder."""
    import shutil

    shutil.rmtree(Path(path).parent, ignore_errors=True)


def check_exit_file(path: str, host: str) -> None:
    """Raise LaunchError if the exit file cannot be written on this node."""
    folder = Path(path).parent
    if not mode_of(folder):
        raise LaunchError(
            f"'hpcgpu launch' waits for the run's exit code in {folder}, which is not there on {host}: this node and "
            "that of 'hpcgpu launch' share no such folder. Start it on the first node of the job, or set HOME to a "
            "folder that both share, or start the ranks by the line that 'hpcgpu plan --script' shows"
        )


def write_exit_code(path: str, code: int) -> None:
    """Write the run's exit code."""
    try:
        write(Path(path), f"{code}\n")
    except OSError as e:
        log.say(f"the run's exit code, {code}, could not be written: {e}")


def read_exit_code(path: str, wait_s: float = 0.0) -> int | None:
    """Return the run's exit code; None if it is not there within ``wait_s`` seconds."""
    end = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(read(Path(path)))
        if time.monotonic() >= end:
            return None
        time.sleep(_LOOK_S)
