"""A private folder of one process on this node, removed at its end and, after a crash, by the next one that starts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Self

from hpcgpu.errors import ConfigError
from hpcgpu.spill.storage import parents

logger = logging.getLogger("distributed.worker.memory")
_LOCK = ".lock"
# A node's processes of a run, a client's of this machine, a launcher's, a GPUWorker's, and a store's disk tier.
KINDS = ("run", "client", "launch", "worker", "spill")
_RANDOM = 8  # characters that tempfile.mkdtemp adds
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
# What a file system says that knows no flock (Lustre without -o flock).
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Scratch:
    """A folder of mode 0700 with a lock that the kernel frees when all processes that have it end, however they end.

    Immutable. Who needs one of ``KINDS`` makes it at the start, and removes it once, in any thread.

    Attributes
    ----------
    path : Path
        The folder.
    lock : int
        File descriptor of the locked file.

    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self.lock = path, lock

    @classmethod
    def make(cls, parent: str | None, name: str, *, trusted: bool = False) -> Self:
        """Make one below ``parent`` (default: TMPDIR); those of dead processes are removed first.

        Parameters
        ----------
        parent : str or None
            With ``~`` and ``$VARIABLES``; made if it is not there.
        name : str
            What it is for, one of ``KINDS``.
        trusted : bool
            Take ``parent`` also where others can change a folder above it.

        Raises
        ------
        ConfigError
            No folder can be made there, it names a variable that is not set, or others can change a folder above it.

        """
        home = home_of(parent)
        try:
            parents.make(home)
            if not trusted and (who := parents.changed_by(home)):
                raise ConfigError(
                    f"{said(parent)} is not safe for the files of a run: {who}, and so run code as you; give a folder "
                    "below one that is yours alone (chmod go-w), or say trust_local_directory if you trust them"
                )
            sweep(home)
            while (made := _make(home, name)) is None:
                continue
        except OSError as e:
            raise ConfigError(
                f"{said(parent)} cannot hold the files of a run: {e.strerror or e}; "
                "give a folder that can be written, on a disk of this node"
            ) from e
        return cls(*made)

    @property
    def lock_path(self) -> Path:
        """The file that is locked."""
        return self.path / _LOCK

    def remove(self) -> None:
        """Remove the folder and what is in it; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def home_of(parent: str | None) -> Path:
    """Return the folder that ``local_directory`` means here."""
    return Path(expanded(parent) if parent else tempfile.gettempdir())


def said(parent: str | None) -> str:
    """Return the option with the folder that it means here, for messages."""
    given = f"local_directory={os.fspath(home_of(parent))!r}"
    return given if parent else f"{given} (TMPDIR)"


def trust_note(parent: str | None) -> tuple[str, ...]:
    """Return what is to be said of a folder that is taken though others can change one above it."""
    who = parents.changed_by(home_of(parent))
    return (f"{said(parent)} is taken, as trust_local_directory says, though {who}",) if who else ()


def expanded(path: str) -> str:
    """Return a path with ``~`` and ``$VARIABLES`` as they are here: sites name their scratch folders so, by job.

    Raises
    ------
    ConfigError
        A variable is not set, or nobody's home is meant.

    """
    if unset := next((name for name in _VARIABLE.findall(path) if name not in os.environ), None):
        raise ConfigError(
            f"local_directory={path!r}: {unset} is not set on {os.uname().nodename}; take one that each job has, or "
            "give the folder"
        )
    try:
        return os.path.expandvars(Path(path).expanduser())
    except RuntimeError as e:
        raise ConfigError(f"local_directory={path!r}: {e}; give the folder") from e


def _prefix(name: str) -> str:
    # the lock of another node is not seen on every shared file system: each node looks at its own folders only
    return f"hpcgpu-{name}-{os.getuid()}-{os.uname().nodename}-"


def _make(home: Path, name: str) -> tuple[Path, int] | None:
    """Make a folder and lock it; None if another process that started now took it for a dead one."""
    folder = Path(tempfile.mkdtemp(prefix=_prefix(name), dir=home))
    try:
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in _NO_LOCKS:
            logger.warning("%s has no file locks: after a crash %s must be removed by hand", home, folder)
            return folder, lock
        os.close(lock)
        if isinstance(e, BlockingIOError):
            return None
        raise
    if os.fstat(lock).st_nlink:
        return folder, lock
    os.close(lock)
    return None


def sweep(home: Path) -> None:
    """Remove the folders of this user's processes on this node that have died."""
    # no more than what mkdtemp adds: a node whose name only begins as this one's has its own
    found = [path for kind in KINDS for path in home.glob(f"{glob.escape(_prefix(kind))}{'?' * _RANDOM}")]
    for path in found:
        try:
            _sweep(path)
        except FileNotFoundError:
            continue  # another process that starts was faster
        except OSError as e:
            logger.warning("the folder %s of an earlier process could not be looked at: %s", path, e)


def _sweep(path: Path) -> None:
    if path.is_symlink() or path.lstat().st_uid != os.getuid():
        return
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # it died, or is, between making the folder and the lock
        with contextlib.suppress(OSError):
            path.rmdir()
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return  # its process lives
    finally:
        os.close(lock)
