"""The folders above our folders: made private, and checked, since a user who can rename such a folder can swap ours."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as the kernel's (path_resolution(7))
_ALL_IDS = ("0", "0", "4294967295")


def make(path: Path) -> None:
    """Make a folder, and the missing ones above it, with mode 0700, whatever the umask is."""
    for folder in reversed((path, *path.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def changed_by(path: Path) -> str:
    """Return which folder on the way to ``path`` other users can change, and which users; "" if no user can."""
    # They could swap our folder for one of theirs, from which Python would import. With the sticky bit, as on /tmp,
    # they can rename only their own files. All folders up to the root are checked: a file system moves with the folders
    # above its mount point.
    shared = False  # whether others can make links in the folder of the last step
    for folder, facts in _steps(path):
        mode = facts.st_mode
        is_link = stat.S_ISLNK(mode)
        if not is_link and not stat.S_ISDIR(mode):
            return ""  # a file has no folders below it
        if not _is_trusted(facts.st_uid) and (shared or not is_link):
            return f"{folder} belongs to {_user(facts.st_uid)}, who can replace files in it"
        if is_link:
            continue
        shared = bool(mode & _OTHERS_WRITE)
        if shared and not mode & stat.S_ISVTX and (who := _writers(facts)):
            return f"{who} can replace files in {folder} (mode {stat.S_IMODE(mode):04o})"
    return ""


def _steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the folders and links that the kernel looks up for a path, as far as it exists."""
    here, links = Path("/"), 0
    todo = list(reversed(path.absolute().parts[1:]))
    yield here, here.lstat()
    while todo:
        part = todo.pop()
        if part == "..":
            here = here.parent
            continue
        try:
            facts = (here / part).lstat()
        except FileNotFoundError:
            return
        yield here / part, facts
        if not stat.S_ISLNK(facts.st_mode):
            here /= part
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = (here / part).readlink()
        here = Path("/") if target.is_absolute() else here
        todo += [p for p in reversed(target.parts) if p != "/"]


def _is_trusted(uid: int) -> bool:
    """Tell whether a user is root or this user. In a container without root the host's root is an unknown user."""
    if uid in (0, os.getuid()):
        return True
    return uid == int(Path("/proc/sys/kernel/overflowuid").read_text()) and _is_in_namespace()


def _is_in_namespace() -> bool:
    """Tell whether only some of the host's users have a number in this process (user_namespaces(7))."""
    return tuple(Path("/proc/self/uid_map").read_text().split()) != _ALL_IDS


def _writers(facts: os.stat_result) -> str:
    """Return who may write to a folder, besides its owner and root; "" if its group has this user only."""
    if facts.st_mode & stat.S_IWOTH:
        return "every user of this node"
    with contextlib.suppress(KeyError):
        group, me = grp.getgrgid(facts.st_gid), pwd.getpwuid(os.getuid())
        # a private group with the user's name, as Debian and Red Hat make it, with umask 002
        if (group.gr_gid, group.gr_name) == (me.pw_gid, me.pw_name) and not {*group.gr_mem} - {me.pw_name}:
            return ""
        return f"every member of group {group.gr_name}"
    return f"every member of group {facts.st_gid}"


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"
