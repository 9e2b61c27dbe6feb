"""A private folder of one process on this node: removed at its end or, after a crash, by the next process.

Warnings about it depend on the file system that it lies on. The store's disk tier lies in it.
"""

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
from typing import NamedTuple, Self

from hpcgpu.errors import ConfigError, opt, plain
from hpcgpu.host import private
from hpcgpu.host.path_writers import changed_by
from hpcgpu.units import format_bytes

_MEMORY = frozenset(("tmpfs", "ramfs"))
_NETWORK = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "dvs"))
_NETWORK |= frozenset(("lustre", "gpfs", "beegfs", "panfs", "pvfs2", "wekafs"))
_ESCAPED = re.compile(r"\\([0-7]{3})")
logger = logging.getLogger("distributed.worker.memory")
_LOCK = ".lock"
# For a run's processes on a node, a client on this machine, a launcher, a GPUWorker, a store's disk tier; stage.sh's.
KINDS = ("run", "client", "launch", "worker", "spill", "stage")
_RANDOM = 8  # the number of characters that tempfile.mkdtemp adds: another node's name may begin with this one's
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
# Errors of a file system without flock (Lustre without -o flock).
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Scratch:
    """A folder of mode 0700 with a lock, which the kernel frees when the last process that has it ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self.lock = path, lock  # the file descriptor of the locked file
        self.lock_path = path / _LOCK

    @classmethod
    def make(cls, parent: str | None, name: str, *, trusted: bool = False) -> Self:
        """Make a folder below ``parent`` (default: TMPDIR); ConfigError if others can change it, unless ``trusted``."""
        home = home_of(parent)
        try:
            make_private(home)
            if not trusted and (who := changed_by(home)):
                raise ConfigError(
                    f"{describe(parent)} is not safe for the files of a run: {who}, and so run code as you; give a "
                    f"folder that only you can write to (chmod go-w), or, if you trust them, set "
                    f"{opt('trust_local_directory', None)}"
                )
            sweep(home)
            while (made := _make(home, name)) is None:
                continue
        except OSError as e:
            raise ConfigError(
                f"{describe(parent)} cannot hold the files of a run: {e.strerror or e}; "
                "give a writable folder on a disk of this node"
            ) from e
        return cls(*made)

    def remove(self) -> None:
        """Remove the folder with its contents; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def home_of(parent: str | None) -> Path:
    """Return the folder that ``local_directory`` means on this node."""
    return Path(expanded(parent) if parent else tempfile.gettempdir()).absolute()  # a task may change its folder


def describe(parent: str | None) -> str:
    """Return the option with the folder that it means on this node, for messages."""
    option = plain(opt("local_directory", os.fspath(home_of(parent))))
    return option if parent else f"{option} (TMPDIR)"


def trust_note(parent: str | None) -> tuple[str, ...]:
    """Return the warning about a folder that is accepted although other users can change a folder above it."""
    who = changed_by(home_of(parent))
    return (f"{describe(parent)} is accepted because of trust_local_directory, although {who}",) if who else ()


def expanded(path: str) -> str:
    """Return a path with ``~`` and ``$VARIABLES`` replaced, as sites name the scratch folders of jobs."""
    if unset := next((name for name in _VARIABLE.findall(path) if name not in os.environ), None):
        raise ConfigError(
            f"{opt('local_directory', path)}: {unset} is not set on {os.uname().nodename}; use a variable that each "
            "job has, or give the folder"
        )
    return os.path.expandvars(private.expanded(path, opt("local_directory", path)))


def _prefix(name: str) -> str:
    # not every shared file system shows the locks of other nodes: each node sweeps its own folders only
    return f"hpcgpu-{name}-{os.getuid()}-{os.uname().nodename}-"


def _make(home: Path, name: str) -> tuple[Path, int] | None:
    """Make a folder and lock it; None if another process meanwhile took it for the folder of a dead process."""
    folder = Path(tempfile.mkdtemp(prefix=_prefix(name), dir=home))
    try:
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in _NO_LOCKS:
            logger.warning("%s has no file locks; after a crash of this process, remove %s by hand", home, folder)
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
    """Remove the folders of this user's dead processes on this node."""
    for path in [path for kind in KINDS for path in home.glob(f"{glob.escape(_prefix(kind))}{'?' * _RANDOM}")]:
        try:  # only the characters of mkdtemp follow: the name of another node may begin with this one's
            _sweep(path)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as e:
            logger.warning("the folder %s of an earlier process could not be read: %s", path, e)


def _sweep(path: Path) -> None:
    if path.is_symlink() or path.lstat().st_uid != os.getuid():
        return
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # its process has made the folder but not yet the lock, or died in between
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


def make_private(path: Path) -> None:
    """Make a folder, and the missing ones above it, with mode 0700, whatever the umask is."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


class Mount(NamedTuple):
    """A mounted file system: its mount point, type and source."""

    point: str
    kind: str
    source: str

    @property
    def is_network(self) -> bool:
        """True if other machines can see it."""
        return self.kind in _NETWORK

    @property
    def is_memory(self) -> bool:
        """True if it lies in memory."""
        return self.kind in _MEMORY


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Return the mount of a path without links, from the text of /proc/self/mountinfo (proc(5))."""
    mount = None
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if not dash or len(fields) < 5 or len(kinds) < 2:
            continue
        point, source = (_ESCAPED.sub(lambda m: chr(int(m[1], 8)), field) for field in (fields[4], kinds[1]))
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # of several mounts on one point the last one hides the others (autofs, and its mount)
        if inside and (mount is None or len(point) >= len(mount.point)):
            mount = Mount(point, kinds[0], source)
    return mount


def notes(folder: str | None, max_spill_bytes: int = 0, mountinfo: str | None = None) -> tuple[str, ...]:
    """Return the warnings about a spill folder, one sentence each; writes no file."""
    option, home = describe(folder), home_of(folder).resolve()
    path = next(p for p in (home, *home.parents) if p.exists())
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        why = "is not writable" if path.is_dir() else "is not a folder"
        raise ConfigError(
            f"{option} cannot hold the files of a run: {path} {why}; give a writable folder on a disk of this node"
        )
    free_bytes = shutil.disk_usage(path).free  # before the mounts are read: it makes autofs mount
    if mountinfo is None:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    out = []
    if (mount := mount_of(os.fspath(path), mountinfo)) and (kind := _describe_mount(mount)):
        out.append(f"{option} {kind}; give a folder on a disk of this node")
    if free_bytes < max_spill_bytes:
        out.append(
            f"{option} has {format_bytes(free_bytes)} free, but up to {format_bytes(max_spill_bytes)} may be spilled "
            "there; values that do not fit stay in host memory; give a folder with more room, or remove files"
        )
    return tuple(out)


def _describe_mount(mount: Mount) -> str:
    """Return why a file system is a poor place for spilled values; "" if it is a good one."""
    if mount.is_memory:
        return f"is in memory ({mount.kind} on {mount.point}): values spilled there free no memory"
    if mount.is_network:
        return (
            f"is on a network file system ({mount.kind}, {mount.source} on {mount.point}): "
            "all nodes spill through its servers, which other users need, too"
        )
    if mount.kind == "fuse" or mount.kind.startswith("fuse."):
        return (
            f"is on a file system that a program serves ({mount.kind} on {mount.point}), often over the network: "
            "spilling is as slow as this program"
        )
    return ""
