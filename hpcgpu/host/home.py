"""The user's home, and what is in it of ours."""

from __future__ import annotations

import os
from pathlib import Path

from hpcgpu.errors import ConfigError, LaunchError


def own_folder(name: str) -> Path:
    """Return ``~/.hpcgpu/NAME``.

    Raises
    ------
    LaunchError
        Neither HOME nor the user database says where the home is, as in some containers.

    """
    try:
        return Path.home() / ".hpcgpu" / name
    except RuntimeError:
        raise LaunchError(f"user {os.getuid()} has no home on {os.uname().nodename}: set HOME") from None


def expanded(path: str, said: str) -> Path:
    """Return a path with ``~`` as it is here; ``said`` is what was given, and where.

    Raises
    ------
    ConfigError
        There is no such user.

    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{said}: {path.partition('/')[0]} is nobody's home here; give the folder") from None
