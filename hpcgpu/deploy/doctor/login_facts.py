"""The facts of the login node, and whether the batch system would accept the job; nothing is submitted."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcgpu import batch
from hpcgpu.deploy import settings as all_settings
from hpcgpu.deploy.doctor import probes
from hpcgpu.deploy.jobs.planned_job import PlannedJob, read_job
from hpcgpu.errors import ConfigError, HpcGpuError, SubmitError
from hpcgpu.host import limits
from hpcgpu.host import run as programs
from hpcgpu.model import Result
from hpcgpu.plan.doctor import findings, login
from hpcgpu.plan.jobs.needs import Size
from hpcgpu.plan.jobs.request import gpus_per_node
from hpcgpu.report.job import layout_of

_LIMIT_S = 4.0
_WRITE_BYTES = 4 << 20
_SYSTEMS = (("slurm", "sbatch"), ("pbs", "qsub"))
_NO_SYSTEM = "no batch system here (neither sbatch nor qsub): this is no login node of a cluster"


def read(
    options: Mapping[str, object], options_from: str, batch: str | None, *, must: bool
) -> tuple[PlannedJob | None, str]:
    """Read the job of these options, or the reason against one, for a batch system that is named, the site's or here.

    Raises ConfigError for wrong values, and if the job ``must`` be submitted also for too few.
    """
    here = batch or next((name for name, program in _SYSTEMS if shutil.which(program)), "")
    try:
        return read_job(options, options_from, (), batch if "site" in options else here or None), ""
    except ConfigError as error:
        if must or (options and here):
            raise
        all_settings.read(options, options_from)  # a wrong value is an error without a batch system, too
        return None, str(error) if here else _NO_SYSTEM


def facts(job: PlannedJob | None, no_job: str) -> login.LoginFacts:
    """Gather this machine's facts within a few seconds; nothing is submitted."""
    scratch = (job.user.settings.local_directory if job else None) or os.environ.get("SCRATCH")
    checks: dict[str, Callable[[], Any]] = {
        "python": probes.python,
        "environment": partial(probes.mounted, Path(sys.prefix)),
        "home": partial(probes.folder, Path.home(), _WRITE_BYTES),
        "limits": limits.read,
        "names": probes.names,
    }
    if job:
        settings, nodes = job.user.settings, job.spec.nodes
        checks["request"] = partial(_request, job)
        checks["size"] = lambda: login.judge_size(size_of(job), limits.read(), is_certain=settings.scheduler == "here")
        checks["start"] = lambda: login.judge_start(probes.imports_of(settings, nodes))
    if scratch and Path(scratch).is_dir():
        checks["scratch"] = partial(probes.folder, Path(scratch), _WRITE_BYTES)
    results, unknown = probes.gather(checks, _LIMIT_S)
    no_scratch = "no --local-directory and no $SCRATCH; --submit checks the nodes' own"
    if scratch:
        no_scratch = f"{scratch} is not here; --submit checks it on the nodes"
    return login.LoginFacts(
        **results, unknown={**dict.fromkeys(("request", "size", "start"), no_job), "scratch": no_scratch, **unknown}
    )


def size_of(job: PlannedJob) -> Size:
    """Return the size of a cluster as the options have it; scale() and adapt() may change it."""
    settings = job.user.settings
    return Size.of(layout_of(settings, job.spec.nodes, gpus_per_node(settings)))


def _request(job: PlannedJob) -> findings.CheckResult:
    """Ask the batch system whether it would accept the job; nothing is submitted."""
    user, spec, system = job
    command = system.test(system.script(spec))
    if command is None:
        return _queue(job)
    program = command.argv[0]
    if not shutil.which(program):
        return findings.not_looked_at(f"there is no {program} on this machine")
    try:
        if version := system.version():
            system.read_version(programs.run_sync(replace(version, timeout_s=_LIMIT_S / 2)))
        starts = system.read_test(programs.run_sync(replace(command, timeout_s=_LIMIT_S - 0.5)))
    except SubmitError as error:
        if error.transient:
            return findings.not_looked_at(f"{program} does not answer now: {error}")
        return findings.failed(str(error), login.refusal_advice(user.batch, str(error)))
    except HpcGpuError as error:
        return findings.failed(str(error), "only the administrators can install a newer one")
    return findings.ok(f"{user.batch} would take the job: {starts}")


def _queue(job: PlannedJob) -> findings.CheckResult:
    """Check that the queue is open, for a batch system that tests a request by a submission only."""
    user, spec, _ = job

    async def ask() -> list[Result]:
        commands = (replace(command, timeout_s=_LIMIT_S - 0.5) for command in batch.questions(user.batch))
        return await asyncio.gather(*map(programs.run, commands))

    queues = batch.read(user.batch, asyncio.run(ask()))
    queue, open_ = spec.queue or queues.default, [queue.name for queue in queues.queues]
    if queue and open_ and queue not in open_:
        refused = f"queue {queue} takes no jobs; open queues: {', '.join(open_)}"
        return findings.failed(refused, login.refusal_advice(user.batch, refused))
    about_queue = f"; its queue {queue} takes jobs" if queue and open_ else ""
    return findings.not_looked_at(f"{user.batch} tests a request by a submission only, as --submit does{about_queue}")
