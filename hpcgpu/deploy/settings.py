"""The user's settings, from all places on this machine where they may stand."""

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
from hpcgpu.host import log
from hpcgpu.host.home import expanded
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Settings
from hpcgpu.model.limit import read_disk_limit, read_part
from hpcgpu.model.plain import read_option
from hpcgpu.model.settings import CUDF, RMM, options, user_name

if TYPE_CHECKING:
    from hpcgpu.model import Site

_MEMORY_SECTION = "distributed.worker.memory"
_MEMORY_OPTIONS: Mapping[str, Callable[[object], float]] = {
    **dict.fromkeys(("target", "spill", "pause", "terminate"), read_part),
    "max-spill": read_disk_limit,
}
_said: set[str] = set()  # notes, in this process


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings that the user wants, and the site that they are for."""

    settings: Settings
    site: Site | None
    batch: str = ""  # the batch system to which a job is submitted; "": none


def read(
    given: Mapping[str, object], given_from: str, batch: str | None = None, entry_point: str = "", *, live: bool = False
) -> Wanted:
    """Return settings and site from keywords or flags, environment, dask configuration and site file.

    Parameters
    ----------
    given : mapping
        Keywords or flags, by the users' names.
    given_from : str
        How messages name the place of a given value: ``"option --{flag}"``.
    batch : str, optional
        The batch system to which a job is submitted; empty for the site's. dask-jobqueue's section for it counts, too.
    entry_point : str
        One of :data:`hpcgpu.config.entry_points.ENTRY_POINTS`, or any other that has a use for all options.
    live : bool
        Ask the batch system for its queues and nodes: where a site's file says otherwise, they count, and it is said.

    Raises
    ------
    ConfigError
        A name or a value is wrong, or the site file is.

    """
    section = dask_section()
    name = chosen_site(given, dask_config=section, environ=os.environ)
    site = in_file = sites.read(name) if name not in (None, sites.NONE) else None
    if site and live:
        site, differing = sites.as_it_is(site, os.environ)
    if name is None and batch is not None:
        sites.say_hint(os.environ)
    system = batch or (site.batch if site and batch is not None else "")
    settings = read_settings(
        given,
        site=site,
        dask_config=section,
        environ=os.environ,
        given_from=given_from,
        jobqueue=jobqueue_section(system) if system else None,
        asks=batch is not None,
        dask_places=_dask_places(section),
    )
    if in_file and live and differing:
        sites.say_differences(differing, settings, in_file)
    check_entry_point(entry_point, settings, given, in_job=read_allocation(os.environ).batch != "local")
    _check_ucx(settings)
    _say_unused(settings)
    if "dask" in sys.modules:  # else this process has no workers; ranks check after their import
        check_dask_memory()
    return Wanted(_expanded(settings), site, system)


def _say_unused(settings: Settings) -> None:
    """Say once that simulated GPUs have neither RMM nor cuDF: a script for GPUs runs on them unchanged."""
    names = [name for name in (*RMM, *CUDF) if getattr(settings, name)] if settings.gpus else []
    text = f"{settings.said('gpus')}: simulated GPUs have neither RMM nor cuDF; without effect: {', '.join(names)}"
    if names and text not in _said:
        _said.add(text)
        log.say(text)


def check_dask_memory() -> None:
    """Read the options of Dask's configuration that the store and the memory monitors take.

    Raises
    ------
    ConfigError
        One of them is no limit.

    """
    import dask.config

    said = dask.config.get(_MEMORY_SECTION, None) or {}
    for name, read in _MEMORY_OPTIONS.items():
        read_option(f"{_MEMORY_SECTION}.{name}", said.get(name), "Dask's configuration", read)


def _check_ucx(settings: Settings) -> None:
    """Raise ConfigError if UCX cannot be used; nothing has been submitted yet."""
    if settings.protocol != "ucx":
        return
    from hpcgpu.deploy.network import protocols
    from hpcgpu.host.discover import slingshot_interfaces

    if not protocols.is_ucx_installed():
        raise ConfigError(f"{settings.said('protocol')} {protocols.ucx_missing()}")
    if found := slingshot_interfaces():
        raise ConfigError(
            f"{settings.said('protocol')}, but this machine's network is Slingshot ({', '.join(found)}), for which UCX "
            "has no transport: leave protocol out, which gives tls on the nearest interface"
        )


def _expanded(settings: Settings) -> Settings:
    """Return the settings with ``~`` replaced as on this machine: no shell and no batch system does it."""
    if not (folder := settings.log_directory or "").startswith("~"):
        return settings
    return replace(settings, log_directory=str(expanded(folder, settings.said("log_directory"))))


def in_job(settings: Settings, site: Site | None, batch: str) -> Settings:
    """Return the settings of a run in a job of ``batch``, with the site's own launcher if it has one."""
    words = site.launcher.command if site and site.batch == batch else ()
    if not site or not words or settings.launcher is not None:
        return settings
    sources = MappingProxyType({**settings.sources, "launcher": site.said("launcher", "command")})
    return replace(settings, launcher=shlex.join(words), sources=sources)


def jobqueue_section(batch: str) -> tuple[str, Mapping[str, object]] | None:
    """Return dask-jobqueue's section for a batch system without its own defaults; say once which part is ignored."""
    if "dask" not in sys.modules and not _is_mentioned(("jobqueue",)):
        return None
    import dask.config

    from hpcgpu.config import jobqueue

    path = f"jobqueue.{batch}"
    section = dask.config.get(path, None)
    if not isinstance(section, dict):
        return (path, section) if section else None
    for defaults in dask.config.defaults:
        section = jobqueue.without(section, dask.config.get(path, {}, config=defaults) or {})
    ignored = "; ".join(jobqueue.ignored(section))
    if ignored and ignored not in _said:
        _said.add(ignored)
        log.say(f"dask config {path}: ignored are {ignored}")
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
    """Return where the values of a section stand: a variable, or the last file that has them; in none, a script's."""
    if not isinstance(section, dict) or not section:
        return {}
    import dask.config

    found: dict[str, str] = {}
    for path, config in dask.config.collect_yaml(dask.config.paths, return_paths=True):
        own = config.get("hpcgpu") if isinstance(config, dict) else None
        for name, value in own.items() if isinstance(own, dict) else ():
            if name in section and section[name] == value:
                found[name] = str(path)
    variables = {name: f"DASK_HPCGPU__{str(name).upper().replace('-', '_')}" for name in section}
    return found | {name: variable for name, variable in variables.items() if variable in os.environ}


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


def _is_mentioned(words: tuple[str, ...] = ("hpcgpu", "jit-unspill")) -> bool:
    variables = ("DASK_INTERNAL_INHERIT_CONFIG", *(f"DASK_{word.upper()}" for word in words))
    if any(name.startswith(variables) for name in os.environ):
        return True
    own = os.environ.get("DASK_CONFIG", "~/.config/dask")
    homes = [os.environ.get("DASK_ROOT_CONFIG", "/etc/dask"), "~/.config/dask", own]
    homes += [f"{prefix}/etc/dask" for prefix in {sys.prefix, *python_site.PREFIXES}]
    for home in [Path(os.path.expanduser(h)) for h in homes]:  # noqa: PTH111 - as dask: ~ stays where nobody has one
        files = [home] if home.is_file() else [*home.glob("*.y*ml"), *home.glob("*.json")]
        if any(word in path.read_text(errors="replace") for path in files for word in words):
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
