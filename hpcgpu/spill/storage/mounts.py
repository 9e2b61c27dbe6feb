"""Warnings about the spill folder, by the file system that it lies on."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from hpcgpu.errors import ConfigError
from hpcgpu.spill.storage.scratch import describe, home_of
from hpcgpu.units import format_bytes

_MEMORY = frozenset(("tmpfs", "ramfs"))
_NETWORK = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "dvs"))
_NETWORK |= frozenset(("lustre", "gpfs", "beegfs", "panfs", "pvfs2", "wekafs"))
_ESCAPED = re.compile(r"\\([0-7]{3})")


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
