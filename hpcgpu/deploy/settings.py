"""The user's settings from all places on this machine, and their site."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from hpcgpu.config.entry_points import check_entry_point
from hpcgpu.config.layers import chosen_site, read_settings
from hpcgpu.deploy.dask_config import check_dask_memory, dask_places, dask_section, jobqueue_section
from hpcgpu.deploy.site_files import as_it_is, load_site, say_hint
from hpcgpu.errors import ConfigError
from hpcgpu.host import log
from hpcgpu.host.private import expanded
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import Settings
from hpcgpu.model.settings import CUDF, RMM

if TYPE_CHECKING:
    from hpcgpu.model import Site


NONE = "none"  # site="none": no site, and no hint of one


@dataclass(frozen=True, slots=True)
class Wanted:
    """The user's settings, and their site."""

    settings: Settings
    site: Site | None
    batch: str = ""  # the batch system to which a job is submitted; "": none


def read(
    options: Mapping[str, object],  # by the users' names
    options_from: str,  # their place in messages: "option --{flag}"
    batch: str | None = None,  # the system to which a job is submitted, "" for the site's
    entry_point: str = "",
    *,
    live: bool = False,  # the batch system's present queues and nodes count in place of the site file's
) -> Wanted:
    """Read settings and site from keywords or flags, environment, dask configuration and site file; or ConfigError."""
    section = dask_section()
    name = chosen_site(options, dask_config=section, environ=os.environ)
    site = load_site(name) if name not in (None, NONE) else None
    if site and live:
        site = as_it_is(site, os.environ)
    if name is None and batch is not None:
        say_hint(os.environ)
    system = batch or (site.batch if site and batch is not None else "")
    settings = read_settings(
        options,
        site=site,
        dask_config=section,
        environ=os.environ,
        given_from=options_from,
        jobqueue=jobqueue_section(system) if system else None,
        asks=batch is not None,
        dask_places=dask_places(section),
    )
    check_entry_point(entry_point, settings, options, in_job=read_allocation(os.environ).batch != "local")
    _check_ucx(settings)
    # a script for GPUs runs on simulated ones unchanged
    if settings.gpus and (unused := [name for name in (*RMM, *CUDF) if getattr(settings, name)]):
        log.say_once(
            f"{settings.cite('gpus')}: simulated GPUs have neither RMM nor cuDF; without effect: {', '.join(unused)}"
        )
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if settings.gpus and devices and read_allocation(os.environ).batch == "local":  # in a job it is not the user's
        text = f"CUDA_VISIBLE_DEVICES={devices} has no effect on simulated GPUs; their number is that of gpus"
        log.say_once(f"{settings.cite('gpus')}: {text}")
    if "dask" in sys.modules:  # else this process has no workers; ranks check after their import
        check_dask_memory()
    folder = settings.log_directory or ""
    if folder.startswith("~"):  # no shell and no batch system replaces it
        settings = replace(settings, log_directory=str(expanded(folder, settings.opt("log_directory"))))
    return Wanted(settings, site, system)


def _check_ucx(settings: Settings) -> None:
    """Raise ConfigError if UCX cannot be used; nothing has been submitted yet."""
    if settings.protocol != "ucx":
        return
    from hpcgpu.deploy import network
    from hpcgpu.host.discover import slingshot_interfaces

    network.require_ucx(settings.opt("protocol"), ConfigError)
    if interfaces := slingshot_interfaces():
        raise ConfigError(
            f"{settings.opt('protocol')}, but this machine's network is Slingshot ({', '.join(interfaces)}), for "
            "which UCX has no transport: leave protocol out, which gives tls on the nearest interface"
        )


def in_job(settings: Settings, site: Site | None, batch: str) -> Settings:
    """Return the settings of a run in a job of ``batch``, with the site's own launcher if it has one."""
    argv = site.launcher.command if site and site.batch == batch else ()
    if not site or not argv or settings.launcher is not None:
        return settings
    sources = MappingProxyType({**settings.sources, "launcher": site.place("launcher", "command")})
    return replace(settings, launcher=shlex.join(argv), sources=sources)
