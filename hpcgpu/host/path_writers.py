"""Which other users can change a path: who can rename a folder above ours can swap ours for one with other modules.

With the sticky bit, as on /tmp, they can rename only their own files. All folders up to the root are checked: a file
system moves with the folders above its mount point.
"""

from __future__ import annotations

import contextlib
import getpass
import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ALL_IDS = ["0", "0", "4294967295"]
_NFS4_WRITES = 0x02 | 0x04 | 0x40 | 0x40000 | 0x80000  # add file, add folder, delete child, write ACL, write owner


def changed_by(path: Path, *, by_new_files: bool = False) -> str:
    """Return which folder on the way to ``path``, or which file there, others can change, and who; "" if no user can.

    They could swap our folder for one of theirs, from which Python would import. With the sticky bit, as on /tmp, they
    can rename only their own files. All folders up to the root are checked: a file system moves with the folders above
    its mount point. ``by_new_files``: also if they can only add files to the last folder, as to /tmp.
    """
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
    entries = [*struct.iter_unpack("<HHI", acl[4:])]
    # posix_acl_xattr.h: tag, permissions, id; user 2, group 8; the mask (16) limits both
    mask = next((permissions for tag, permissions, _ in entries if tag == 0x10), 7)
    writers = [(tag, number) for tag, permissions, number in entries if permissions & mask & 2]
    others = [_user(number) for tag, number in writers if tag == 2 and not _is_trusted(number)]
    return next(iter(others + [f"every member of group {_group(gid)}" for tag, gid in writers if tag == 8]), "")


def _named_nfs4(acl: bytes) -> str:
    """Return the first user or group that an access control list of NFSv4 names as a writer; "" if it names none."""
    mine, at = {"root", "0", str(os.getuid()), getpass.getuser()}, 4
    # RFC 7530, 6.2.1: type (0 allows), flags (8 for new files only, 64 of a group), mask, and who, padded to 4 bytes
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
