"""The site that this machine is: a hint of its file, its live facts, and the draft of a file for it."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from hpcgpu.deploy.site_files import site_files
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.host import log, private
from hpcgpu.host.private import user_folder

if TYPE_CHECKING:
    from hpcgpu.model import Site


_NAMED_BY = ("NERSC_HOST", "SYSTEMNAME", "LMOD_SYSTEM_NAME")  # variables that name the machine at several centres
_PROGRAMS = {"slurm": "sinfo", "pbs": "pbsnodes"}
_OF_QUEUES_AND_NODES = 2  # of batch.questions(): those before the one about the whole batch system
_PATIENCE_S = 10.0  # then the file counts, and the batch system itself refuses wrong requests


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
