"""Locate hpcgpu's folder in the user's home."""

from __future__ import annotations

import os
from pathlib import Path

from hpcgpu.errors import ConfigError, LaunchError


def own_folder(name: str) -> Path:
    """Return ``~/.hpcgpu/NAME``; raise LaunchError if the user has no home, as in some containers."""
    try:
        return Path.home() / ".hpcgpu" / name
    except RuntimeError:
        raise LaunchError(f"user {os.getuid()} has no home on {os.uname().nodename}: set HOME") from None


def expanded(path: str, said: str) -> Path:
    """Expand ``~`` in a path; raise ConfigError, with the setting ``said``, if that user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{said}: {path.partition('/')[0]} is nobody's home here; give the folder") from None
