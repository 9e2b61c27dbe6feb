"""Ranks from a copy of their Python environment on each node (``environment='stage'``), which stage.sh makes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hpcgpu.errors import HpcGpuError, LaunchError, opt
from hpcgpu.host import log, private, remover, run
from hpcgpu.host.archive import STAGE, Archive, archive_of
from hpcgpu.host.environment import Environment, editable, read
from hpcgpu.model import Command, Settings
from hpcgpu.units import format_bytes

_ID = 8  # characters of a launch, as those that mkdtemp adds to other folders of its kind
_SEND_S = 600.0
# What a shell would read in double quotes; "$" with what os.path.expandvars takes for a name, also if it can be none.
_SHELL = re.compile(r'["\\`]|\$(?:\w+|\{[^}]*\})?', re.ASCII)
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})", re.ASCII)
_SPECIAL = re.compile(r'["\\`$]')


def staged(argv: tuple[str, ...], settings: Settings, launch: str, *, sends: bool) -> tuple[str, ...]:
    """Return the command that starts a rank from a copy of its environment; or log why that cannot be, and return it.

    ``launch`` is an identifier of this launch; ``sends``: sbcast is to send the archive to the nodes of its job.
    """
    try:
        if "PYTHONHOME" in os.environ:
            raise LaunchError("PYTHONHOME is set, which a copy cannot follow")
        environment = read(shutil.which(argv[0]) or argv[0])
        if environment.kind == "container":
            raise LaunchError(f"{environment.prefix} lies in an image, which each node reads as one file already")
        archive = archive_of(environment)
    except HpcGpuError as e:
        log.say(f"Python starts from its own place ({settings.cite('environment')}): {e}")
        return argv
    size = format_bytes(archive.nbytes)
    log.say(f"each node starts Python from a copy of {environment.prefix} ({environment.kind}), which takes {size}")
    if stay := editable(environment):
        log.say(f"not copied, so the nodes read them in their own place: editable installs ({', '.join(stay)})")
    if sends:
        send(archive, settings, launch)
    return command(argv, environment, archive, settings, launch)


def command(
    argv: tuple[str, ...], environment: Environment, archive: Archive, settings: Settings, launch: str
) -> tuple[str, ...]:
    """Return the command that starts ``argv`` from the copy, or without one from its own place."""
    facts = (
        str(archive.path),
        archive.sha256,
        str((archive.nbytes >> 10) + 1),
        "trusted" if settings.trust_local_directory else "-",
    )
    path = ":".join((*(f"{STAGE}{f}" for f in environment.early), *_unordered(environment)))
    copy = (environment.python, path or "-", ":".join(environment.prefixes) or "-", os.path.abspath(remover.__file__))
    script = str(Path(__file__).with_suffix(".sh"))
    return ("/bin/sh", script, parent(settings.local_directory), launch[:_ID], *facts, *copy, *argv)


def _unordered(environment: Environment) -> tuple[str, ...]:
    """Return the rest of PYTHONPATH where no folder of packages is copied, whose file of paths would have it."""
    return () if environment.site else (*(f"{STAGE}{f}" for f in environment.late), *environment.early)


def parent(local_directory: str | None) -> str:
    """Return a shell expression, for double quotes, of the folder that ``local_directory`` means on a node."""
    if not local_directory:
        return "${TMPDIR:-/tmp}"
    path = str(private.expanded(local_directory, opt("local_directory", local_directory)))
    return _SHELL.sub(lambda m: m[0] if _VARIABLE.fullmatch(m[0]) else _SPECIAL.sub(r"\\\g<0>", m[0]), path)


def send(archive: Archive, settings: Settings, launch: str) -> None:
    """Send the archive to the nodes of this Slurm job; nodes that do not get it read it from the shared file system."""
    from hpcgpu.host.scratch import home_of

    try:
        target = home_of(settings.local_directory) / f"hpcgpu-stage-{os.getuid()}-{launch[:_ID]}.sent"
        done = run.run_sync(Command(("sbcast", "--preserve", str(archive.path), str(target)), timeout_s=_SEND_S))
        trouble = done.stderr.strip() if done.returncode else ""
    except HpcGpuError as e:
        trouble = str(e)
    if trouble:
        log.say(f"sbcast has not sent the Python environment, so each node reads {archive.path}: {trouble}")
