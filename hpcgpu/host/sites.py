"""Find site files: in the user's folder, in the checkout or the installed package, or at a path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpcgpu.errors import ConfigError
from hpcgpu.host.private import expanded

_PACKAGE = Path(__file__).parent.parent


def package_folder(name: str) -> Path:
    """Return the folder ``NAME`` of an installed wheel, or of this checkout."""
    installed = _PACKAGE / "data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


@dataclass(frozen=True, slots=True)
class SiteText:
    """A site file's text."""

    text: str
    name: str  # of the file in messages


def folders() -> tuple[Path, Path]:
    """Return the folders of site files, the user's first."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))  # where there is no home, too
    return (config / "hpcgpu" / "sites", package_folder("site_configs"))


def site_files() -> dict[str, Path]:
    """Return the site files by name."""
    paths: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return paths


def find_site(name: str) -> SiteText:
    """Return the text of a known site, or of a path (with ``/``, or ending in ``.yaml``); or ConfigError."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        path, shown = expanded(name, f"site={name!r}"), name
    else:
        sites = site_files()
        if name not in sites:
            raise ConfigError(
                f"no site {name!r}; there are: {', '.join(sorted(sites)) or 'none'}. Give one of them, or the path "
                f"of a site file; your own can stand in {folders()[0]}"
            )
        path = sites[name]
        home = Path(os.path.expanduser("~"))  # where there is no home, too
        shown = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
        if path.parent in folders()[1:]:
            shown = f"site_configs/{path.name}"
    try:
        return SiteText(path.read_text(encoding="utf-8"), shown)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site file {name} cannot be read: {error}") from error
