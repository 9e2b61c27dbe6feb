"""Site files on this machine: of the user, of the package, or at a path; which one it looks like; job templates."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.host import log, private
from hpcgpu.host.private import expanded, user_folder

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
    """Return the site files by name."""
    paths: dict[str, Path] = {}
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            paths.setdefault(path.stem, path)
    return paths


def find_site(name: str) -> tuple[str, str]:
    """Return the text and the shown name of the file of a known site, or at a path (with ``/``, or ``.yaml``)."""
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
        home = Path(os.path.expanduser("~"))  # noqa: PTH111 - without a home, too
        shown = f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
        if path.parent in folders()[1:]:
            shown = f"site_configs/{path.name}"
    try:
        return path.read_text(encoding="utf-8"), shown
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"site file {name} cannot be read: {error}") from error


def read(name: str) -> Site:
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
    return {name: value for name, value in plain.items() if name != "origins"}


def recognize(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name of the known machine that this looks like, and the reason."""
    from hpcgpu.config.sites.machine import looks_like

    texts = {}
    for name, path in site_files().items():
        with contextlib.suppress(OSError, UnicodeDecodeError):  # reported when the file is requested
            texts[name] = path.read_text(encoding="utf-8")
    return looks_like(texts, environ, socket.gethostname())


def say_hint(environ: Mapping[str, str]) -> None:
    """Log which known machine this looks like, once for each machine and user; it changes no setting."""
    from hpcgpu.config.sites.machine import hint

    if (match := recognize(environ)) and _is_first(match[0]):
        log.say(hint(*match))


def batch_here() -> str:
    """Return the batch system whose programs are on this machine; "" without one."""
    return next((system for system, program in _PROGRAMS.items() if shutil.which(program)), "")


def _is_first(name: str) -> bool:
    """Return True if a machine is named for the first time, and remember it."""
    if name in _logged:
        return False
    _logged.add(name)
    try:
        mark = private.make_folder(user_folder("hints")) / name
        if mark.exists():
            return False
        private.write(mark, "")
    except (OSError, HpcGpuError):  # a home that is not writable: the next process repeats the hint
        pass
    return True


def as_it_is(site: Site, environ: Mapping[str, str]) -> Site:
    """Return a site with its batch system's present queues and nodes."""
    # The batch system is not asked if this is another machine than the file's, or has no such batch system.
    from concurrent.futures import ThreadPoolExecutor  # all are imported here: each rank of a run imports this module

    from hpcgpu.batch import inventory
    from hpcgpu.config.sites.machine import apply_live_facts, is_here
    from hpcgpu.host.run import run_sync
    from hpcgpu.model import Result

    if not shutil.which(_PROGRAMS[site.batch]) or not is_here(site.match, environ, socket.gethostname()):
        return site
    commands = [replace(command, timeout_s=_PATIENCE_S) for command in inventory.questions(site.batch)]
    with ThreadPoolExecutor() as threads:  # the caller may be in an event loop, as every cell of a notebook is
        results = list(threads.map(run_sync, commands[:_OF_QUEUES_AND_NODES]))
    results += [Result(command.argv, 0, "", "") for command in commands[_OF_QUEUES_AND_NODES:]]
    return apply_live_facts(site, inventory.read(site.batch, results))


def draft(name: str, batch: str | None, environ: Mapping[str, str]) -> str:
    """Return a site file for this machine, with marks for unknown facts; raise ConfigError without Slurm or PBS.

    ``name=""`` is the environment's name for the machine, or the host's; ``batch=None`` is the one whose programs are
    here.
    """
    from hpcgpu.batch import inventory
    from hpcgpu.config.sites.machine import render_draft
    from hpcgpu.config.sites.read import read_site
    from hpcgpu.host import discover
    from hpcgpu.host.run import run_sync

    if not (system := batch or batch_here()):
        raise ConfigError(
            f"neither {' nor '.join(_PROGRAMS.values())} is on this machine: run it on a login node, or give --batch"
        )
    facts = inventory.read(system, [run_sync(command) for command in inventory.questions(system)])
    match = {variable: environ[variable] for variable in _NAMED_BY if environ.get(variable)}
    plain = re.sub(r"[^a-z0-9._-]", "-", (name or next(iter(match.values()), "") or _host()).lower()).lstrip("._-")
    try:
        topology = discover.topology()
    except HpcGpuError as error:
        facts, topology = replace(facts, silent=(*facts.silent, f"this node: {error}")), None
    text = render_draft(facts, plain or "mine", datetime.now(UTC).date().isoformat(), topology, match)
    read_site(text, "the draft")
    return text


def _host() -> str:
    """Return the host's name without domain and number: ``login3.example.org`` is ``login``."""
    return socket.gethostname().partition(".")[0].rstrip("0123456789-")


def template_folder() -> Path:
    """Return the folder of the templates and of the programs that they start."""
    return package_folder("jobscripts")


def template_names() -> list[str]:
    """Return the names of all templates: Slurm, PBS, none; the shortest template of each first."""
    systems = ("slurm", "pbs", "mpirun")
    files = [p.name for p in template_folder().iterdir() if p.suffix in (".sbatch", ".sh")]
    return sorted(files, key=lambda name: (systems.index(name.partition(".")[0].partition("-")[0]), "-" in name, name))


def template_text(name: str) -> str:
    """Return the text of a template; raise ConfigError for another name."""
    if name not in template_names():
        raise ConfigError(f"there is no template {name!r}; there are: {', '.join(template_names())}")
    return (template_folder() / name).read_text()


def purpose_and_usage(name: str) -> tuple[str, str]:
    """Return what a template is for, and how it is submitted."""
    purpose, usage = [line[2:] for line in template_text(name).splitlines() if line.startswith("# ")][:2]
    return purpose, usage.removeprefix("usage: ")
