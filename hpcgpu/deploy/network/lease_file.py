"""The client's sign of life before there is a scheduler: a file that it touches in the run's folder.

A job may start hours after its client has died, and the guard with it: it looks here first.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_LEASE = "lease"
_DETACHED = "detached"


def touch(folder: Path) -> None:
    """Take the lease; called by the client before the submission.

    Raises
    ------
    FileNotFoundError
        The folder is gone.

    """
    (folder / _LEASE).touch(mode=0o600)


def renew(folder: Path) -> None:
    """Renew the lease, every few seconds. It makes no file: the folder may just be removed, and would stay for that.

    Raises
    ------
    FileNotFoundError
        There is no lease, or no folder any more.

    """
    os.utime(folder / _LEASE)


def detach(folder: Path) -> None:
    """Give the lease up on purpose: jobs of this run need no client."""
    (folder / _DETACHED).touch(mode=0o600)


def is_detached(folder: Path) -> bool:
    """Tell whether the client has given the lease up on purpose."""
    return (folder / _DETACHED).exists()


def is_held(folder: Path, grace_s: float) -> bool:
    """Tell whether a job of this run has somebody to run for; called by its rank 0 before it starts anything.

    True while the client has touched the lease within ``grace_s`` seconds, when it has detached, and when there is
    no lease file at all: then whoever made the folder does not use one, and the scheduler's lease has to do.
    """
    if is_detached(folder):
        return True
    try:
        now = _server_time(folder)
        # a plain stat() may be answered from NFS's cache; open() asks the server
        with (folder / _LEASE).open() as f:
            return now - os.fstat(f.fileno()).st_mtime <= grace_s
    except FileNotFoundError:
        return folder.is_dir()


def _server_time(folder: Path) -> float:
    """Return the file server's clock, by which the lease was touched: clocks of nodes differ."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as f:
        os.utime(f.fileno())
        return os.fstat(f.fileno()).st_mtime


def take_up(folder: Path) -> None:
    """Hold the lease of a run that was detached: it ends with its new client."""
    touch(folder)
    (folder / _DETACHED).unlink(missing_ok=True)
