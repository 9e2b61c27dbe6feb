"""The doctor on a login node: its facts and its findings."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcgpu.batch import inventory
from hpcgpu.deploy import settings
from hpcgpu.deploy.jobs.job_plan import PlannedJob, read_job
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.host import probes
from hpcgpu.host import run as programs
from hpcgpu.model import Result
from hpcgpu.plan.doctor.facts import Folder, Limits, LoginFacts, Names, Python, Request
from hpcgpu.spill.storage import mounts

_LIMIT_S = 4.0
_WRITE_BYTES = 4 << 20
_SYSTEMS = (("slurm", "sbatch"), ("pbs", "qsub"))
_NO_SYSTEM = "no batch system here (neither sbatch nor qsub): this is no login node of a cluster"


@dataclass(frozen=True, slots=True)
class Asked:
    """The job that the doctor checks, or why there is none."""

    job: PlannedJob | None
    why_not: str = ""


def read(given: Mapping[str, object], given_from: str, batch: str | None, *, must: bool) -> Asked:
    """Return the job of these settings, for the named batch system, the site's, or the one that is here.

    ``given_from`` names in messages where a value was set. With ``must`` the job will be submitted: ConfigError if too
    little was given for one; else only for wrong values.
    """
    here = batch or next((name for name, program in _SYSTEMS if shutil.which(program)), "")
    try:
        return Asked(read_job(given, given_from, (), batch if "site" in given else here or None))
    except ConfigError as error:
        if must or (given and here):
            raise
        settings.read(given, given_from)  # a wrong value is an error without a batch system, too
        return Asked(None, str(error) if here else _NO_SYSTEM)


def facts(asked: Asked) -> LoginFacts:
    """Gather this machine's facts within a few seconds; nothing is submitted."""
    job = asked.job
    home = Path.home()
    scratch = (job[0].settings.local_directory if job else None) or os.environ.get("SCRATCH")
    looks: dict[str, Callable[[], Any]] = {
        "python": python,
        "environment": partial(_mounted, Path(sys.prefix)),
        "home": partial(folder, home),
        "limits": lambda: Limits(**probes.limits()),
        "names": lambda: Names(**probes.names()),
    }
    if job:
        looks["request"] = partial(_request, job)
    if scratch and Path(scratch).is_dir():
        looks["scratch"] = partial(folder, Path(scratch))
    seen, why = probes.gather(looks, _LIMIT_S)
    none = "no --local-directory and no $SCRATCH; --submit looks at the nodes' own"
    unknown = {"request": asked.why_not, "scratch": f"{scratch} is not here; --submit looks at it" if scratch else none}
    return LoginFacts(**seen, unknown={**unknown, **why})


def python() -> Python:
    """Return this Python."""
    return Python(**probes.python())


def folder(path: Path, write_bytes: int = _WRITE_BYTES) -> Folder:
    """Measure a folder by writing and removing some bytes."""
    return replace(Folder(**probes.folder(path, write_bytes)), **_kind(path))


def _mounted(path: Path) -> Folder:
    return Folder(path=str(path), **_kind(path))


def _kind(path: Path) -> dict[str, Any]:
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    mount = mounts.mount_of(os.fspath(path.resolve()), text)
    return {"kind": mount.kind, "network": mount.is_network, "memory": mount.is_memory} if mount else {}


def _request(job: PlannedJob) -> Request:
    """Ask the batch system whether it would accept the job; nothing is submitted."""
    user, spec, system = job
    name = user.batch
    asked = system.test(system.script(spec))
    if asked is None:
        return _queue(job)
    if not shutil.which(asked.argv[0]):
        return Request(batch=name, unasked=f"there is no {asked.argv[0]} on this machine")
    try:
        starts = system.read_test(programs.run_sync(replace(asked, timeout_s=_LIMIT_S - 0.5)))
    except SubmitError as error:
        if error.transient:
            return Request(batch=name, unasked=f"{asked.argv[0]} does not answer now: {error}")
        return Request(batch=name, refused=str(error))
    return Request(batch=name, starts=starts)


def _queue(job: PlannedJob) -> Request:
    """Check that the queue is open, for a batch system that says no more without a submission."""
    user, spec, _ = job

    async def ask() -> list[Result]:
        asked = (replace(command, timeout_s=_LIMIT_S - 0.5) for command in inventory.questions(user.batch))
        return await asyncio.gather(*map(programs.run, asked))

    known = inventory.read(user.batch, asyncio.run(ask()))
    queue, open_ = spec.queue or known.default, [queue.name for queue in known.queues]
    if queue and open_ and queue not in open_:
        return Request(batch=user.batch, refused=f"queue {queue} takes no jobs; those that do: {', '.join(open_)}")
    said = f"; its queue {queue} takes jobs" if queue and open_ else ""
    return Request(
        batch=user.batch, unasked=f"{user.batch} cannot be asked without a submission, which --submit makes{said}"
    )
