"""Site files of the user and of the package, and the package's job templates."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgpu.config.values import nearest
from hpcgpu.errors import ConfigError, opt
from hpcgpu.host import log
from hpcgpu.host.private import expanded

if TYPE_CHECKING:
    from hpcgpu.model import Site


_PACKAGE = Path(__file__).parent.parent


def package_folder(name: str) -> Path:
    """Return the folder ``NAME`` of an installed wheel, or of this checkout."""
    installed = _PACKAGE / "data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def folders() -> tuple[Path, Path]:
    """Return the folders of site files, the user's first."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))  # noqa: PTH111 - without a home, too
    return (config / "hpcgpu" / "sites", package_folder("site_configs"))


def site_files() -> dict[str, Path]:
    """Return the site files by name; the user's before the package's."""
    return {path.stem: path for folder in reversed(folders()) for path in folder.glob("*.yaml")}


def find_site(name: str) -> tuple[str, str]:
    """Return the text and the shown name of the file of a known site, or at a path (with ``/``, or ``.yaml``)."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        path, shown = expanded(name, opt("site", name)), name
    else:
        sites = site_files()
        if name not in sites:
            raise ConfigError(
                f"no site {name!r}: {nearest(name, sites)} Give one of 'hpcgpu site list', or the path of a site file; "
                f"your own can stand in {folders()[0]}"
            )
        path = sites[name]
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 - without a home, too
        shown = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
        if path.parent in folders()[1:]:
            shown = f"site_configs/{path.name}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site file {name} cannot be read: {error}") from error
    from hpcgpu.host.path_writers import changed_by

    # who can change the file of an installation can change its code, too
    if not {folders()[1], Path(sys.prefix)} & {*path.parents} and (who := changed_by(Path(path))):
        log.say_once(f"site file {shown} is not safe: {who}, and so run code as you (job_script_prologue, launcher)")
    return text, shown


def load_site(name: str) -> Site:
    """Return a site by its name, or by the path of its file; raise ConfigError if it is unknown or wrong."""
    from hpcgpu.config.sites.read import read_site  # YAML and its checker: 25 ms

    return read_site(*find_site(name))


def described(site: Site) -> dict[str, Any]:
    """Return all keys of a site file as plain data, missing ones with their defaults."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(replace(site, origins={}), enc_hook=dict)  # of read-only mappings
    del plain["origins"]
    return plain


def templates() -> dict[str, Path]:
    """Return the job templates by name: of Slurm, PBS, none; the shortest of each first."""
    systems = ("slurm", "pbs", "mpirun")
    paths = {p.name: p for p in package_folder("jobscripts").iterdir() if p.suffix in (".sbatch", ".sh")}
    order = {name: (systems.index(re.split("[.-]", name)[0]), "-" in name, name) for name in paths}
    return {name: paths[name] for name in sorted(paths, key=order.__getitem__)}


def purpose_and_usage(template: Path) -> tuple[str, str]:
    """Return what a template is for, and how it is submitted."""
    purpose, usage = [line[2:] for line in template.read_text().splitlines() if line.startswith("# ")][:2]
    return purpose, usage.removeprefix("usage: ")
