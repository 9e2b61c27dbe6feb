"""Files that travel with the package: site files and job templates."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def folder(name: str) -> Path:
    """Return the folder ``NAME`` of a wheel that was installed, or of the checkout that this is."""
    installed = _PACKAGE / "data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
