"""What this process was granted: its cores, NUMA nodes and host memory."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hpcgpu.model import CpuSet

_PROC = Path("/proc")
_LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB", re.M)
_NODES = re.compile(r"^Mems_allowed_list:\s*(\S*)", re.M)


class _Mount(NamedTuple):
    """A cgroup hierarchy: its kind, what of it is mounted, and where."""

    kind: str
    root: PurePosixPath
    point: Path


def granted_cpus() -> CpuSet:
    """Return the PUs that this process may run on: cgroup and launcher's mask together."""
    return CpuSet(os.sched_getaffinity(0))


def granted_memory_nodes(proc: Path = _PROC) -> CpuSet:
    """Return the NUMA nodes that this process may take memory from; empty when the kernel does not say."""
    found = _NODES.search((proc / "self" / "status").read_text())
    return CpuSet.parse(found[1]) if found else CpuSet()


def memory_limit_bytes(proc: Path = _PROC) -> int:
    """Return the host memory that this process may use, in bytes.

    The least of all memory and of the limits of its own cgroup and of those above it, as far as
    they can be seen, in cgroup v1 and v2. Slurm and PBS limit a cgroup above the process's own.
    """
    limits = [int(_TOTAL.findall((proc / "meminfo").read_text())[0]) * 1024]
    mounts = _mounts(_text(proc / "self" / "mountinfo"))
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        kind = "cgroup2" if number == "0" else "cgroup"
        if kind == "cgroup" and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.kind == kind:
                limits += _limits(mount, PurePosixPath(path))
    return min(limits)


def _mounts(text: str) -> list[_Mount]:
    """Read mountinfo: ``36 35 0:31 /root /point options … - kind source super-options``."""
    out = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 5 or not rest or rest[0] not in _LIMITS:
            continue
        if rest[0] == "cgroup" and "memory" not in rest[-1].split(","):
            continue
        out.append(_Mount(rest[0], PurePosixPath(fields[3]), Path(fields[4].replace(r"\040", " "))))
    return out


def _limits(mount: _Mount, path: PurePosixPath) -> list[int]:
    """Return the limits from the cgroup at ``path`` up to where the hierarchy is mounted."""
    # A container may see only its own part of the hierarchy, and the path as the host names it.
    inside = path.relative_to(mount.root) if path.is_relative_to(mount.root) else PurePosixPath()
    if ".." in inside.parts or inside.is_absolute():
        inside = PurePosixPath()
    out = []
    for part in (inside, *inside.parents):
        for name in _LIMITS[mount.kind]:
            word = _text(mount.point / part / name).strip()
            if word.isdigit():  # "max" is no limit; version 1 writes a number above all memory
                out.append(int(word))
    return out


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
