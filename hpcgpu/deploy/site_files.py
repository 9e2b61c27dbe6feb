"""Site files and job templates, and the site that this machine is: its hint, its live facts, a draft of its file.

Together: a draft is a site file of this machine, and is recognized as one.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgpu.config.values import nearest
from hpcgpu.errors import ConfigError, HpcGpuError, opt, plain
from hpcgpu.host import log, private
from hpcgpu.host.private import expanded, user_folder

if TYPE_CHECKING:
    from hpcgpu.model import Site


_PACKAGE = Path(__file__).parent.parent
_NAMED_BY = ("NERSC_HOST", "SYSTEMNAME", "LMOD_SYSTEM_NAME")  # variables that name the machine at several centres
_PROGRAMS = {"slurm": "sinfo", "pbs": "pbsnodes"}
_OF_QUEUES_AND_NODES = 2  # of batch.questions(): those before the one about the whole batch system
_PATIENCE_S = 10.0  # then the file counts, and the batch system itself refuses wrong requests


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
                f"no site {name!r} in 'hpcgpu site list', and no path of a site file; your own can stand in "
                f"{folders()[0]}; {nearest(name, sites)}"
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
    if not name:
        return
    with suppress(OSError, HpcGpuError):  # a home that is not writable: the next process repeats the hint
        mark = private.make_folder(user_folder("hints")) / name
        if mark.exists():
            return
        private.write(mark, "")
    log.say_once(
        f"this looks like {name} ({why}): {plain(opt('site', name))} (or HPCGPU_SITE={name}) knows its queues, "
        "limits and nodes. Nothing is assumed without it, and this is said once; HPCGPU_SITE=none says that you want "
        "none"
    )


def batch_here() -> str:
    """Return the batch system whose programs are on this machine; "" without one."""
    return next((system for system, program in _PROGRAMS.items() if shutil.which(program)), "")


def as_it_is(site: Site, environ: Mapping[str, str]) -> Site:
    """Return a site with its batch system's present queues and nodes; as it is if this is another machine."""
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
    """Return a site file for this machine, with marks for unknown facts; raise ConfigError without Slurm or PBS.

    Without a name it is the environment's name for the machine, or the host's without domain and number.
    """
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
