"""Warnings about the spill folder, by the file system that it lies on."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from hpcgpu.errors import ConfigError
from hpcgpu.spill.storage.scratch import home_of, said
from hpcgpu.units import format_bytes

_MEMORY = frozenset(("tmpfs", "ramfs"))
_NETWORK = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "dvs"),
        *("lustre", "gpfs", "beegfs", "panfs", "pvfs2", "wekafs"),
    )
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system: its mount point, its type and its source. Immutable; :func:`mount_of` makes it."""

    point: str
    kind: str
    source: str

    @property
    def is_network(self) -> bool:
        """Whether other machines can see it."""
        return self.kind in _NETWORK

    @property
    def is_memory(self) -> bool:
        """Whether it lies in memory."""
        return self.kind in _MEMORY


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """Return the mount of a path without links, from the text of /proc/self/mountinfo (proc(5))."""
    found = None
    for line in mountinfo.splitlines():
        before, dash, after = line.partition(" - ")
        words, kinds = before.split(), after.split()
        if not dash or len(words) < 5 or len(kinds) < 2:
            continue
        point, source = (_ESCAPED.sub(lambda m: chr(int(m[1], 8)), word) for word in (words[4], kinds[1]))
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # of several mounts on one point the last one hides the others (autofs, and its mount)
        if inside and (found is None or len(point) >= len(found.point)):
            found = Mount(point, kinds[0], source)
    return found


def notes(folder: str | None, wanted_bytes: int = 0, mountinfo: str | None = None) -> tuple[str, ...]:
    """Return the warnings about a spill folder, one sentence each; nothing is written."""
    given, home = said(folder), home_of(folder)
    there = _existing(home.resolve())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if there.is_dir() else "is not a folder"
        raise ConfigError(
            f"{given} cannot hold the files of a run: {there} {why}; "
            "give a folder that can be written, on a disk of this node"
        )
    free_bytes = shutil.disk_usage(there).free  # before the mounts are read: it makes autofs mount
    if mountinfo is None:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    out = []
    if (mount := mount_of(os.fspath(there), mountinfo)) and (kind := _kind_note(mount)):
        out.append(f"{given} {kind}; give a folder on a disk of this node")
    if free_bytes < wanted_bytes:
        out.append(
            f"{given} has {format_bytes(free_bytes)} free, and {format_bytes(wanted_bytes)} may be spilled there: what "
            "does not fit stays in host memory; give a folder with more room, or remove what is there"
        )
    return tuple(out)


def _kind_note(mount: Mount) -> str:
    if mount.is_memory:
        return (
            f"is in memory ({mount.kind} on {mount.point}): what is spilled there takes the memory that it was to free"
        )
    if mount.is_network:
        return (
            f"is on a network file system ({mount.kind}, {mount.source} on {mount.point}): "
            "what all nodes spill goes through the servers that others use as well"
        )
    if mount.kind == "fuse" or mount.kind.startswith("fuse."):
        return (
            f"is on a file system that a program serves ({mount.kind} on {mount.point}), often over the network: "
            "spilling is as slow as that program"
        )
    return ""


def _existing(path: Path) -> Path:
    """Return the folder, or the first one above it that exists."""
    return next(p for p in (path, *path.parents) if p.exists())
