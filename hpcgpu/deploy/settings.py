"""The user's settings, from all places on this machine."""

from __future__ import annotations

import json
import os
import shlex
import site as python_site
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.config.entry_points import check_entry_point
from hpcgpu.config.layers import chosen_site, read_settings
from hpcgpu.deploy import sites
from hpcgpu.errors import ConfigError
from hpcgpu.host.private import expanded
from hpcgpu.launch import read_allocation
from hpcgpu.model import Settings
from hpcgpu.model.limit import read_disk_limit, read_option, read_part
from hpcgpu.model.settings import CUDF, RMM

if TYPE_CHECKING:
    from hpcgpu.model import Site

_MEMORY_SECTION = "distributed.worker.memory"
_MEMORY_OPTIONS: Mapping[str, Callable[[object], float]] = {
    **dict.fromkeys(("target", "spill", "pause", "terminate"), read_part),
    "max-spill": read_disk_limit,
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The user's settings, and their site."""

    settings: Settings
    site: Site | None
    batch: str = ""  # the batch system to which a job is submitted; "": none


def read(
    options: Mapping[str, object],
    options_from: str,
    batch: str | None = None,
    entry_point: str = "",
    *,
    live: bool = False,
) -> Wanted:
    """Read settings and site from keywords or flags, environment, dask configuration and site file; or ConfigError.

    ``options`` are by the users' names; ``options_from`` names their place in messages: ``"option --{flag}"``.
    ``batch`` is the system to which a job is submitted, "" for the site's, with dask-jobqueue's section for it.
    ``live``: the batch system's present queues and nodes count in place of the site file's.
    """
    section = dask_section()
    name = chosen_site(options, dask_config=section, environ=os.environ)
    site = sites.read(name) if name not in (None, sites.NONE) else None
    if site and live:
        site = sites.as_it_is(site, os.environ)
    if name is None and batch is not None:
        sites.say_hint(os.environ)
    system = batch or (site.batch if site and batch is not None else "")
    settings = read_settings(
        options,
        site=site,
        dask_config=section,
        environ=os.environ,
        given_from=options_from,
        jobqueue=jobqueue_section(system) if system else None,
        asks=batch is not None,
        dask_places=_dask_places(section),
    )
    check_entry_point(entry_point, settings, options, in_job=read_allocation(os.environ).batch != "local")
    _check_ucx(settings)
    # a script for GPUs runs on simulated ones unchanged
    if settings.gpus and (unused := [name for name in (*RMM, *CUDF) if getattr(settings, name)]):
        sites.say_once(
            f"{settings.cite('gpus')}: simulated GPUs have neither RMM nor cuDF; without effect: {', '.join(unused)}"
        )
    if "dask" in sys.modules:  # else this process has no workers; ranks check after their import
        check_dask_memory()
    folder = settings.log_directory or ""
    if folder.startswith("~"):  # no shell and no batch system replaces it
        settings = replace(settings, log_directory=str(expanded(folder, settings.cite("log_directory"))))
    return Wanted(settings, site, system)


def check_dask_memory() -> None:
    """Check the memory limits of Dask's configuration; raise ConfigError for a wrong one."""
    import dask.config

    section = dask.config.get(_MEMORY_SECTION, None) or {}
    for name, read in _MEMORY_OPTIONS.items():
        read_option(f"{_MEMORY_SECTION}.{name}", section.get(name), "Dask's configuration", read)


def _check_ucx(settings: Settings) -> None:
    """Raise ConfigError if UCX cannot be used; nothing has been submitted yet."""
    if settings.protocol != "ucx":
        return
    from hpcgpu.deploy.network import protocols
    from hpcgpu.host.discover import slingshot_interfaces

    if not protocols.is_ucx_installed():
        raise ConfigError(f"{settings.cite('protocol')} {protocols.ucx_missing()}")
    if interfaces := slingshot_interfaces():
        raise ConfigError(
            f"{settings.cite('protocol')}, but this machine's network is Slingshot ({', '.join(interfaces)}), for "
            "which UCX has no transport: leave protocol out, which gives tls on the nearest interface"
        )


def in_job(settings: Settings, site: Site | None, batch: str) -> Settings:
    """Return the settings of a run in a job of ``batch``, with the site's own launcher if it has one."""
    argv = site.launcher.command if site and site.batch == batch else ()
    if not site or not argv or settings.launcher is not None:
        return settings
    sources = MappingProxyType({**settings.sources, "launcher": site.place("launcher", "command")})
    return replace(settings, launcher=shlex.join(argv), sources=sources)


def jobqueue_section(batch: str) -> tuple[str, Mapping[str, object]] | None:
    """Return dask-jobqueue's section for a batch system without its own defaults; say once which part is ignored."""
    if "dask" not in sys.modules and not _is_mentioned(("jobqueue",)):
        return None
    import dask.config

    from hpcgpu.config import migration

    path = f"jobqueue.{batch}"
    section = dask.config.get(path, None)
    if not isinstance(section, dict):
        return (path, section) if section else None
    for defaults in dask.config.defaults:
        section = migration.without(section, dask.config.get(path, {}, config=defaults) or {})
    ignored = "; ".join(migration.ignored(section))
    if ignored:
        sites.say_once(f"dask config {path}: ignored are {ignored}")
    return path, section


def dask_section() -> Mapping[str, object]:
    """Return the section ``hpcgpu`` of the dask configuration.

    Importing dask costs 0.1 CPU s, which each rank of ``srun hpcgpu run`` would pay. Dask is not imported if the word
    stands in no variable and no file that Dask would read (docs.dask.org, Configuration).
    """
    if "dask" not in sys.modules and not _is_mentioned():
        return {}
    import dask.config

    section = dask.config.get("hpcgpu", {}) or {}
    jit = dask.config.get("jit-unspill", None)  # dask-cuda's name
    return section if jit is None or not isinstance(section, dict) else {"jit_unspill": jit, **section}


def _dask_places(section: object) -> dict[str, str]:
    """Return the place of each value: a variable, or the last file that has it; no place for values of a script."""
    if not isinstance(section, dict) or not section:
        return {}
    import dask.config

    places: dict[str, str] = {}
    for path, config in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        in_file = config.get("hpcgpu") if isinstance(config, dict) else None
        for name, value in in_file.items() if isinstance(in_file, dict) else ():
            if name in section and section[name] == value:
                places[name] = str(path)
    variables = {name: f"DASK_HPCGPU__{str(name).upper().replace('-', '_')}" for name in section}
    return places | {name: variable for name, variable in variables.items() if variable in os.environ}


def scheduler_address() -> str:
    """Return ``scheduler-address`` of Dask's configuration, which ``dask worker`` takes, too; "" if it is not set."""
    import dask.config

    return str(dask.config.get("scheduler-address", None) or "")


def dask_environ() -> dict[str, str]:
    """Return the variable that gives ranks on this machine Dask's configuration of this process.

    Nannies of Dask's LocalCluster set it for their workers, too. So values that a script has set with
    ``dask.config.set`` count.
    """
    import dask.config

    return {"DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(_as_json(dask.config.global_config))}


def _as_json(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without values that JSON cannot hold, such as functions."""
    out: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            out[key] = _as_json(value)
            continue
        with suppress(TypeError, ValueError):
            json.dumps(value)
            out[key] = value
    return out


def _is_mentioned(names: tuple[str, ...] = ("hpcgpu", "jit-unspill")) -> bool:
    variables = ("DASK_INTERNAL_INHERIT_CONFIG", *(f"DASK_{name.upper()}" for name in names))
    if any(name.startswith(variables) for name in os.environ):
        return True
    users = os.environ.get("DASK_CONFIG", "~/.config/dask")
    homes = [os.environ.get("DASK_ROOT_CONFIG", "/etc/dask"), "~/.config/dask", users]
    homes += [f"{prefix}/etc/dask" for prefix in {sys.prefix, *python_site.PREFIXES}]
    for home in [Path(os.path.expanduser(h)) for h in homes]:  # noqa: PTH111 - as dask: an unknown ~user stays
        files = [home] if home.is_file() else [*home.glob("*.y*ml"), *home.glob("*.json")]
        if any(name in path.read_text(errors="replace") for path in files for name in names):
            return True
    return False
