"""The user's settings from all the places where they may stand, on this machine."""

from __future__ import annotations

import os
import site as python_site
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcgpu.config.layers import chosen_site, read_settings
from hpcgpu.host.sites import find_site
from hpcgpu.model import Settings, Site
from hpcgpu.model.settings import options, user_name


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user wants, and the site it is wanted of."""

    settings: Settings
    site: Site | None


def read(given: Mapping[str, object], given_from: str) -> Wanted:
    """Return settings and site from keywords or flags, environment, dask configuration and site file.

    Parameters
    ----------
    given : mapping
        Keywords or flags, by the users' names.
    given_from : str
        How to name the place of a given value: ``"option --{flag}"``.

    Raises
    ------
    ConfigError
        A name or a value is wrong, or the site file is.

    """
    section = dask_section()
    name = chosen_site(given, dask_config=section, environ=os.environ)
    site = None
    if name is not None:
        from hpcgpu.config.site import read_site  # YAML and its checker: 25 ms

        found = find_site(name)
        site = read_site(found.text, found.name)
    settings = read_settings(given, site=site, dask_config=section, environ=os.environ, given_from=given_from)
    return Wanted(settings, site)


def dask_section() -> Mapping[str, object]:
    """Return the section ``hpcgpu`` of the dask configuration.

    Importing dask costs 0.1 CPU s, which each rank of ``srun hpcgpu run`` would pay: it is left out where no
    variable and no file that dask would read (docs.dask.org, Configuration) has the word in it.
    """
    if "dask" not in sys.modules and not _is_mentioned():
        return {}
    import dask.config

    section = dask.config.get("hpcgpu", {}) or {}
    jit = dask.config.get("jit-unspill", None)  # dask-cuda's name
    return section if jit is None or not isinstance(section, dict) else {"jit_unspill": jit, **section}


def _is_mentioned() -> bool:
    if any(name.startswith(("DASK_HPCGPU", "DASK_INTERNAL_INHERIT_CONFIG")) for name in os.environ):
        return True
    own = os.environ.get("DASK_CONFIG", "~/.config/dask")
    homes = [os.environ.get("DASK_ROOT_CONFIG", "/etc/dask"), "~/.config/dask", own]
    homes += [f"{prefix}/etc/dask" for prefix in {sys.prefix, *python_site.PREFIXES}]
    for home in [Path(h).expanduser() for h in homes]:
        files = [home] if home.is_file() else [*home.glob("*.y*ml"), *home.glob("*.json")]
        if any(word in path.read_text(errors="replace") for path in files for word in ("hpcgpu", "jit-unspill")):
            return True
    return False


def explain(settings: Settings) -> str:
    """Return every setting that is not a default, with where it was set."""
    lines = []
    for option in options():
        name = user_name(option)
        if (where := settings.where(name)) != "default":
            lines.append(f"{name} = {getattr(settings, option.name)!r}    ({where})")
    return "\n".join(lines or ["all settings are defaults"]) + "\n"
