"""Files that hold secrets: mode 0600, in folders of mode 0700 that are ours, never through a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from hpcgpu.errors import HpcGpuError


def make_folder(path: Path) -> Path:
    """Make the folder and those above it that are missing, mode 0700; check that an existing one is ours alone.

    Raises
    ------
    HpcGpuError
        It belongs to another user, is a link, or others may enter it.

    """
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise HpcGpuError(f"{path} must be a folder of yours with mode 0700: chmod 700 it, or remove it")
    return path


def open_new(path: Path) -> BinaryIO:
    """Replace whatever is at the path, even a link or FIFO, by a file of mode 0600; return it open for writing."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def write(path: Path, text: str) -> None:
    """Write the file atomically: a reader sees all of it or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    part.replace(path)


def read(path: Path) -> str:
    """Return the text of a file that nobody else can have written.

    Raises
    ------
    HpcGpuError
        It belongs to another user, or others may read it.
    OSError
        There is no such file, or it is a link.

    """
    # With an opener, for os.fdopen leaves the descriptor of a folder open.
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as f:  # noqa: PTH123
        facts = os.fstat(f.fileno())
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise HpcGpuError(f"{path} holds a secret, but it is not yours alone: owner or mode was changed")
        return f.read()
