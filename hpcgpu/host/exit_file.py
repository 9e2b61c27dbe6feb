"""The file with a run's exit code, written by rank 0 for the launching process, perhaps on another node.

Each launch has a folder for it, which the launching process makes and removes: among the user's private files, which
nodes share, or among temporary files if the home is not writable.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from hpcgpu.errors import HpcGpuError, LaunchError
from hpcgpu.host import log, pids, private
from hpcgpu.host.private import user_folder

_NAME = "exit"
# On a shared file system, another node's file may appear later than the end of that node's process.
_SEEN_S = 3.0
_LOOK_S = 0.2


def make() -> Path:
    """Make this launch's folder; return the path of its exit file."""
    try:
        base = private.make_folder(user_folder("launches"))
        for old in base.iterdir():
            if pids.is_over(old.name):  # of a killed launch of this host
                shutil.rmtree(old, ignore_errors=True)
        folder = private.make_folder(base / pids.mark(os.getpid()))
    except (OSError, HpcGpuError):
        folder = Path(tempfile.mkdtemp(prefix="hpcgpu-end-"))
    return folder / _NAME


def remove(path: str) -> None:
    """Remove the exit file and its folder."""
    shutil.rmtree(Path(path).parent, ignore_errors=True)


def check(path: str, host: str) -> None:
    """Raise LaunchError if the exit file cannot be written on this node."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise LaunchError(
            f"'hpcgpu launch' waits for the run's exit code in {folder}, which is not there on {host}: this node and "
            "that of 'hpcgpu launch' share no such folder. Start it on the first node of the job, or set HOME to a "
            "folder that both share, or start the ranks by the line that 'hpcgpu plan --script' shows"
        )


def write(path: str, code: int) -> None:
    """Write the run's exit code."""
    try:
        private.write(Path(path), f"{code}\n")
    except OSError as e:
        log.say(f"the run's exit code, {code}, could not be written: {e}")


def read(path: str) -> int | None:
    """Return the run's exit code; None if it is not written yet."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(private.read(Path(path)))
    return None


def await_(path: str) -> int | None:
    """Return the run's exit code, waiting a few seconds for a file system to show the file; None without one."""
    end = time.monotonic() + _SEEN_S
    while (code := read(path)) is None and time.monotonic() < end:
        time.sleep(_LOOK_S)
    return code
