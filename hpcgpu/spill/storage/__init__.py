"""A private folder of one process on this node: removed at its end or, after a crash, by the next process.

Checks of the folders above it, since a user who can rename such a folder can swap ours; and warnings about it, by the
file system that it lies on. The disk tier lies in it. And the lock of the store, and of its parts.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import getpass
import glob
import grp
import logging
import os
import pwd
import re
import shutil
import stat
import struct
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from hpcgpu.errors import ConfigError, SpillError
from hpcgpu.units import format_bytes

_MEMORY = frozenset(("tmpfs", "ramfs"))
_NETWORK = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "dvs"))
_NETWORK |= frozenset(("lustre", "gpfs", "beegfs", "panfs", "pvfs2", "wekafs"))
_ESCAPED = re.compile(r"\\([0-7]{3})")
logger = logging.getLogger("distributed.worker.memory")
_LOCK = ".lock"
# For a run's processes on a node, a client on this machine, a launcher, a GPUWorker, a store's disk tier.
KINDS = ("run", "client", "launch", "worker", "spill")
_RANDOM = 8  # the number of characters that tempfile.mkdtemp adds
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
# Errors of a file system without flock (Lustre without -o flock).
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_IDS = ["0", "0", "4294967295"]


class Scratch:
    """A folder of mode 0700 with a lock, which the kernel frees when the last process that has it ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self.lock = path, lock  # the file descriptor of the locked file

    @classmethod
    def make(cls, parent: str | None, name: str, *, trusted: bool = False) -> Self:
        """Make a folder below ``parent`` (default: TMPDIR), after the folders of dead processes are removed."""
        # ConfigError if other users can change a folder above it, unless ``trusted``
        home = home_of(parent)
        try:
            make_private(home)
            if not trusted and (who := changed_by(home)):
                raise ConfigError(
                    f"{describe(parent)} is not safe for the files of a run: {who}, and so run code as you; give a "
                    "folder that only you can write to (chmod go-w), or set trust_local_directory if you trust them"
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

    @property
    def lock_path(self) -> Path:
        """The file that is locked."""
        return self.path / _LOCK

    def remove(self) -> None:
        """Remove the folder with its contents; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def home_of(parent: str | None) -> Path:
    """Return the folder that ``local_directory`` means on this node."""
    return Path(expanded(parent) if parent else tempfile.gettempdir()).absolute()  # a task may change its folder


def describe(parent: str | None) -> str:
    """Return the option with the folder that it means on this node, for messages."""
    option = f"local_directory={os.fspath(home_of(parent))!r}"
    return option if parent else f"{option} (TMPDIR)"


def trust_note(parent: str | None) -> tuple[str, ...]:
    """Return the warning about a folder that is accepted although other users can change a folder above it."""
    who = changed_by(home_of(parent))
    return (f"{describe(parent)} is accepted because of trust_local_directory, although {who}",) if who else ()


def expanded(path: str) -> str:
    """Return a path with ``~`` and ``$VARIABLES`` replaced, as sites name the scratch folders of jobs."""
    if unset := next((name for name in _VARIABLE.findall(path) if name not in os.environ), None):
        raise ConfigError(
            f"local_directory={path!r}: {unset} is not set on {os.uname().nodename}; use a variable that each job has, "
            "or give the folder"
        )
    try:
        return os.path.expandvars(Path(path).expanduser())
    except RuntimeError as e:
        raise ConfigError(f"local_directory={path!r}: {e}; give the folder") from e


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
    # Only the characters that mkdtemp adds may follow: the name of another node may begin with this one's.
    for path in [path for kind in KINDS for path in home.glob(f"{glob.escape(_prefix(kind))}{'?' * _RANDOM}")]:
        try:
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


def changed_by(path: Path, *, by_new_files: bool = False) -> str:
    """Return which folder on the way to ``path``, or which file there, others can change, and who; "" if no user can.

    ``by_new_files``: also if they can only add files to the last folder, as to /tmp.
    """
    # They could swap our folder for one of theirs, from which Python would import. With the sticky bit, as on /tmp,
    # they can rename only their own files. All folders up to the root are checked: a file system moves with the folders
    # above its mount point.
    shared, at = False, ""  # whether others can make links in the folder of the last step, and who
    for folder, facts in _steps(path.absolute()):
        mode = facts.st_mode
        is_link = stat.S_ISLNK(mode)
        if not is_link and not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            return ""
        change = "change" if stat.S_ISREG(mode) else "replace files in"
        if not _is_trusted(facts.st_uid) and (shared or not is_link):
            return f"{folder} belongs to {_user(facts.st_uid)}, who can {change} it"
        if is_link:
            continue
        who = _writers(folder, facts)
        shared, at = bool(mode & _OTHERS_WRITE or who), f"{folder} (mode {stat.S_IMODE(mode):04o})"
        if who and not mode & stat.S_ISVTX:
            return f"{who} can {change} {at}"
    return f"{who} can add files in {at}" if by_new_files and at and who else ""


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the folders and links that the kernel looks up for a path, as far as it exists."""
    for folder in reversed((path, *path.parents)):
        try:
            facts = folder.lstat()
        except FileNotFoundError:
            return
        yield folder, facts
        if stat.S_ISLNK(facts.st_mode):
            with contextlib.suppress(FileNotFoundError):
                folder.stat()  # OSError if links lead to each other
            yield from _steps(folder.parent / folder.readlink())


def _is_trusted(uid: int) -> bool:
    """Tell whether a user is root or this user. In a container without root the host's root is an unknown user."""
    if uid in (0, os.getuid()):
        return True
    # there only some of the host's users have a number (user_namespaces(7))
    is_in_namespace = Path("/proc/self/uid_map").read_text().split() != _ALL_IDS
    return is_in_namespace and uid == int(Path("/proc/sys/kernel/overflowuid").read_text())


def _writers(folder: Path, facts: os.stat_result) -> str:
    """Return who may write to a folder, besides its owner and root; "" if no other user may."""
    if facts.st_mode & stat.S_IWOTH:
        return "every user of this node"
    if named := _named_nfs4(_attribute(folder, "system.nfs4_acl")):
        return f"{named}, by an access control list (nfs4_getfacl),"
    if not facts.st_mode & stat.S_IWGRP:  # with a list of POSIX it is the list's mask
        return ""
    if named := _named(_attribute(folder, "system.posix_acl_access")):
        return f"{named}, by an access control list (getfacl),"
    with contextlib.suppress(KeyError):
        group, me = grp.getgrgid(facts.st_gid), pwd.getpwuid(os.getuid())
        # a private group with the user's name, as Debian and Red Hat make it, with umask 002; other users may have it
        # as their primary group
        if (group.gr_gid, group.gr_name) == (me.pw_gid, me.pw_name):
            primary = (each.pw_name for each in pwd.getpwall() if each.pw_gid == group.gr_gid)
            return f"every member of group {group.gr_name}" if {*group.gr_mem, *primary} - {me.pw_name} else ""
    return f"every member of group {_group(facts.st_gid)}"


def _attribute(folder: Path, name: str) -> bytes:
    with contextlib.suppress(OSError):  # it has none, or its file system knows none
        return os.getxattr(folder, name)
    return b""


def _named(acl: bytes) -> str:
    """Return the first user or group that a POSIX access control list names as a writer; "" if it names none."""
    # posix_acl_xattr.h: tag, permissions, id; user 2, group 8; the mask (16) limits both
    entries = [*struct.iter_unpack("<HHI", acl[4:])]
    mask = next((permissions for tag, permissions, _ in entries if tag == 0x10), 7)
    writers = [(tag, number) for tag, permissions, number in entries if permissions & mask & 2]
    others = [_user(number) for tag, number in writers if tag == 2 and not _is_trusted(number)]
    return next(iter(others + [f"every member of group {_group(gid)}" for tag, gid in writers if tag == 8]), "")


_NFS4_WRITES = 0x02 | 0x04 | 0x40 | 0x40000 | 0x80000  # add file, add folder, delete child, write ACL, write owner


def _named_nfs4(acl: bytes) -> str:
    """Return the first user or group that an access control list of NFSv4 names as a writer; "" if it names none."""
    # RFC 7530, 6.2.1: type (0 allows), flags (8 for new files only, 64 of a group), mask, and who, padded to 4 bytes
    mine, at = {"root", "0", str(os.getuid()), getpass.getuser()}, 4
    while at + 16 <= len(acl):
        kind, flags, mask, length = struct.unpack_from(">IIII", acl, at)
        who, at = acl[at + 16 : at + 16 + length].decode(errors="replace"), at + 16 + -(-length // 4) * 4
        # OWNER@, GROUP@ and EVERYONE@ are in the mode
        if kind or not mask & _NFS4_WRITES or flags & 8 or who.endswith("@"):
            continue
        if flags & 64 or who.partition("@")[0] not in mine:
            return f"{'every member of group' if flags & 64 else 'user'} {who}"
    return ""


def _group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


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


class ReenteredError(SpillError):
    """A thread calls a store while it is inside a store; the next try may succeed."""

    def __init__(self) -> None:
        super().__init__(
            "the spill store is in use by this thread: a __del__ that the garbage collector runs, or a signal handler, "
            "reads, stores or deletes a value during another such call"
        )


class LeafLock(_thread.RLock):  # type: ignore[misc] # final for type checkers only
    """A lock that raises instead of waiting for its own thread. Any thread may take it."""

    # The garbage collector runs a user's __del__ wherever Python code runs, and signals run their handlers: also in a
    # thread that has the lock. A touch of a proxy there would wait for its own thread for ever. It is one of Python's
    # own locks, since an __exit__ in Python would double its time.

    _is_owned: Callable[[], bool]  # threading.Condition calls it, too

    def __init__(self) -> None:
        _LOCKS.append(weakref.ref(self, _LOCKS.remove))

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():
            raise ReenteredError
        return self.acquire()

    @property
    def is_mine(self) -> bool:
        """True if the calling thread has it."""
        return self._is_owned()


_LOCKS: list[weakref.ref[LeafLock]] = []


def is_inside() -> bool:
    """Tell whether the calling thread has the lock of any store: then it must not wait for other threads."""
    return any(lock.is_mine for each in tuple(_LOCKS) if (lock := each()) is not None)
