"""The UCX that ucxx loads in processes of this Python: its folder, and whether it drives InfiniBand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcgpu.model import Topology

# libucx's own loader takes the system's UCX first where it is set (libucx 1.21, load.py).
_SYSTEM_FIRST = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
_LOOK_S = 15.0
_LOADED = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
print(next(line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/libucs.so" in line))
"""


def library(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of that UCX under these variables; None: this Python has no ucxx, or no UCX is there for it."""
    if importlib.util.find_spec("ucxx") is None:
        return None
    wheel = importlib.util.find_spec("libucx")
    bundled = Path(wheel.origin).parent / "lib" if wheel and wheel.origin else None
    if bundled and environ.get(_SYSTEM_FIRST, "false").lower() == "false":
        return bundled
    conda = Path(sys.base_prefix, "lib")  # conda's libraries name it in their RPATH
    if (conda / "libucs.so.0").exists():
        return conda
    # libucx asks for the name without a version. A process of its own: UCX must not be loaded before a fork.
    name = "libucs.so" if bundled else "libucs.so.0"
    argv = [sys.executable, "-c", _LOADED, name]
    try:
        done = subprocess.run(argv, env=dict(environ), capture_output=True, text=True, timeout=_LOOK_S, check=True)
    except (OSError, subprocess.SubprocessError):  # without one libucx takes that of its wheel
        return bundled
    return Path(done.stdout.strip()).parent


def drives_infiniband(folder: Path) -> bool:
    """Return whether a UCX has its module for InfiniBand and RoCE; True where it keeps its modules elsewhere."""
    modules = folder / "ucx"
    return not modules.is_dir() or any(modules.glob("libuct_ib*.so*"))


def without_infiniband(topology: Topology, environ: Mapping[str, str]) -> str:
    """Return the folder of a UCX that cannot use this node's InfiniBand or RoCE; "" if it can, or has nothing to do."""
    if not any(nic.active and nic.kind in ("infiniband", "roce") for nic in topology.nics):
        return ""
    folder = library(environ)
    return "" if folder is None or drives_infiniband(folder) else str(folder)
