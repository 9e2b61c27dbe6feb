"""The user's settings from all places on this machine, and its site files and job templates."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import site as python_site
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.config.layers import check_entry_point, chosen_site, read_settings
from hpcgpu.config.values import nearest
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.host import log, private
from hpcgpu.host.private import expanded, user_folder
from hpcgpu.launch import read_allocation
from hpcgpu.model import Settings
from hpcgpu.model.settings import CUDF, RMM, read_disk_limit, read_option, read_part

if TYPE_CHECKING:
    from hpcgpu.model import Site


_PACKAGE = Path(__file__).parent.parent
NONE = "none"  # site="none": no site, and no hint of one
_NAMED_BY = ("NERSC_HOST", "SYSTEMNAME", "LMOD_SYSTEM_NAME")  # variables that name the machine at several centres
_PROGRAMS = {"slurm": "sinfo", "pbs": "pbsnodes"}
_OF_QUEUES_AND_NODES = 2  # of inventory.questions(): those before the one about the whole batch system
_PATIENCE_S = 10.0  # then the file counts, and the batch system itself refuses wrong requests
_logged: set[str] = set()  # messages of this process


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
        path, shown = expanded(name, f"site={name!r}"), name
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
        say_once(f"site file {shown} is not safe: {who}, and so run code as you (job_script_prologue, launcher)")
    return text, shown


def load_site(name: str) -> Site:
    """Return a site by its name, or by the path of its file; raise ConfigError if it is unknown or wrong."""
    from hpcgpu.config.sites.read import read_site  # YAML and its checker: 25 ms

    return read_site(*find_site(name))


def say_once(text: str) -> None:
    """Log a text, once in this process."""
    if text not in _logged:
        _logged.add(text)
        log.say(text)


def described(site: Site) -> dict[str, Any]:
    """Return all keys of a site file as plain data, missing ones with their defaults."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(replace(site, origins={}), enc_hook=dict)  # of read-only mappings
    del plain["origins"]
    return plain


def recognize(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the known machine that this looks like, and the reason."""
    from hpcgpu.config.sites.recognition import looks_like

    texts = {}
    for name, path in site_files().items():
        with suppress(OSError, UnicodeDecodeError):  # reported when the file is requested
            texts[name] = path.read_text(encoding="utf-8")
    return looks_like(texts, environ, socket.gethostname())


def say_hint(environ: Mapping[str, str]) -> None:
    """Log which known machine this looks like, once for each machine and user; it changes no setting."""
    name, why = recognize(environ) or ("", "")
    if not name or name in _logged:
        return
    _logged.add(name)
    with suppress(OSError, HpcGpuError):  # a home that is not writable: the next process repeats the hint
        mark = private.make_folder(user_folder("hints")) / name
        if mark.exists():
            return
        private.write(mark, "")
    log.say(
        f"this looks like {name} ({why}): site={name!r} (or HPCGPU_SITE={name}) knows its queues, limits and nodes. "
        "Nothing is assumed without it, and this is said once; HPCGPU_SITE=none says that you want none"
    )


def batch_here() -> str:
    """Return the batch system whose programs are on this machine; "" without one."""
    return next((system for system, program in _PROGRAMS.items() if shutil.which(program)), "")


def as_it_is(site: Site, environ: Mapping[str, str]) -> Site:
    """Return a site with its batch system's present queues and nodes."""
    # The batch system is not asked if this is another machine than the file's, or has no such batch system.
    from concurrent.futures import ThreadPoolExecutor  # all are imported here: each rank of a run imports this module

    from hpcgpu import batch
    from hpcgpu.config.sites.live import apply_live_facts
    from hpcgpu.config.sites.recognition import is_here
    from hpcgpu.host.run import run_sync
    from hpcgpu.model import Result

    if not shutil.which(_PROGRAMS[site.batch]) or not is_here(site.match, environ, socket.gethostname()):
        return site
    commands = [replace(command, timeout_s=_PATIENCE_S) for command in batch.questions(site.batch)]
    with ThreadPoolExecutor() as threads:  # the caller may be in an event loop, as every cell of a notebook is
        results = list(threads.map(run_sync, commands[:_OF_QUEUES_AND_NODES]))
    results += [Result(command.argv, 0, "", "") for command in commands[_OF_QUEUES_AND_NODES:]]
    return apply_live_facts(site, batch.read(site.batch, results))


def draft(name: str, system: str | None, environ: Mapping[str, str]) -> str:
    """Return a site file for this machine, with marks for unknown facts; raise ConfigError without Slurm or PBS."""
    # without a name it is the environment's name for the machine, or the host's without domain and number
    from hpcgpu import batch
    from hpcgpu.config.sites.draft import render_draft
    from hpcgpu.config.sites.read import read_site
    from hpcgpu.host import discover
    from hpcgpu.host.run import run_sync

    if not (system := system or batch_here()):
        raise ConfigError(
            f"neither {' nor '.join(_PROGRAMS.values())} is on this machine: run it on a login node, or give --batch"
        )
    facts = batch.read(system, [run_sync(command) for command in batch.questions(system)])
    match = {variable: environ[variable] for variable in _NAMED_BY if environ.get(variable)}
    host = socket.gethostname().partition(".")[0].rstrip("0123456789-")
    plain = re.sub(r"[^a-z0-9._-]", "-", (name or next(iter(match.values()), "") or host).lower()).lstrip("._-")
    try:
        topology = discover.topology()
    except HpcGpuError as error:
        facts, topology = replace(facts, silent=(*facts.silent, f"this node: {error}")), None
    text = render_draft(facts, plain or "mine", datetime.now(UTC).date().isoformat(), topology, match)
    read_site(text, "the draft")
    return text


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
        dask_places=_dask_places(section),
    )
    check_entry_point(entry_point, settings, options, in_job=read_allocation(os.environ).batch != "local")
    _check_ucx(settings)
    # a script for GPUs runs on simulated ones unchanged
    if settings.gpus and (unused := [name for name in (*RMM, *CUDF) if getattr(settings, name)]):
        say_once(
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
    from hpcgpu.deploy import network
    from hpcgpu.host.discover import slingshot_interfaces

    network.require_ucx(settings.cite("protocol"), ConfigError)
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
        say_once(f"dask config {path}: ignored are {ignored}")
    return path, section


def dask_section() -> Mapping[str, object]:
    """Return the section ``hpcgpu`` of the dask configuration."""
    # Importing dask costs 0.1 CPU s, which each rank of srun hpcgpu run would pay. Dask is not imported if the word
    # stands in no variable and no file that Dask would read (docs.dask.org, Configuration).
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
    """Return the variable that gives ranks here what dask.config.set has set; LocalCluster's nannies set it, too."""
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
    for home in [Path(p) for h in homes if os.access(p := os.path.expanduser(h), os.R_OK)]:  # noqa: PTH111 - as dask
        files = [home] if home.is_file() else [*home.glob("*.y*ml"), *home.glob("*.json")]
        if any(name in path.read_text(errors="replace") for path in files for name in names):
            return True
    return False
