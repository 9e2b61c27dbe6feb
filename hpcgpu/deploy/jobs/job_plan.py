"""Translate a run to the job that is requested of a batch system."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgpu.batch import BatchSystem, get
from hpcgpu.config import document, entry_points
from hpcgpu.config.sites.jobs import check_submission, forbidden, notes
from hpcgpu.deploy import settings
from hpcgpu.errors import ConfigError
from hpcgpu.host import log, process
from hpcgpu.model import JobSpec, RunDocument
from hpcgpu.plan.jobs.request import plan_member, plan_request
from hpcgpu.spill.storage import parents

if TYPE_CHECKING:
    from hpcgpu.model import Site


# A job before its submission: the settings, the request, and the batch system for it.
PlannedJob = tuple[settings.Wanted, JobSpec, BatchSystem]


def read_job(
    options: Mapping[str, object],
    given_from: str,
    script: tuple[str, ...] = (),
    batch: str | None = None,
    *,
    live: bool = False,
) -> PlannedJob:
    """Plan the job for a script, or for a cluster object without one; ``live`` as of :func:`settings.read`.

    Raises ConfigError for a wrong or missing setting, or without a batch system.
    """
    user = settings.read(options, given_from, batch or "", entry_points.JOBSCRIPT if script else "", live=live)
    if not user.batch:
        raise ConfigError("no batch system is given; add --batch slurm or --batch pbs, or --site for a known machine")
    shape, folder = ("in-allocation", "") if script else ("gang", "FOLDER-OF-THIS-RUN")
    run_document = RunDocument(settings=user.settings, shape=shape, script=script, folder=folder)
    spec, system = plan_job(run_document, user.site, user.batch)
    for note in system.notes(spec):
        log.say(f"job {spec.name}: {note}")
    return user, spec, system


def mark_of(folder: Path) -> str:
    """Return the mark of all jobs of a run in the batch system; it finds jobs whose ids were lost."""
    return f"hpcgpu-{folder.name}"


def plan_job(
    run: RunDocument, site: Site | None, batch: str, arguments: tuple[str, ...] = ()
) -> tuple[JobSpec, BatchSystem]:
    """Return the request for a run's job, and the batch system for it.

    ``arguments`` are those of ``hpcgpu`` in the job; (): it launches the run. Raises ConfigError if a setting is
    missing that the batch system or the site requires.
    """
    if site and site.batch != batch:
        raise ConfigError(
            f"site {site.name} has {site.batch}, not {batch}: take the class of {site.batch} (hpcgpu plan: leave "
            f"--batch out), or another site= than that of {run.settings.where('site')}"
        )
    check_submission(run.settings, site, member=run.shape == "member")
    if run.shape != "member":
        for note in notes(run.settings, site):
            log.say(note)
    run = replace(run, settings=settings.in_job(run.settings, site, batch))
    plan = plan_member if run.shape == "member" else plan_request
    arguments = arguments or ("launch", "--document", document.render(run))
    spec = plan(run.settings, process.python_argv("hpcgpu", *arguments, python=run.settings.python or ""))
    if run.folder:  # PBS forgets a job at its end unless the site has switched its history on
        spec = replace(spec, exit_file=f"{run.folder}/exit", mark=mark_of(Path(run.folder)))
    system = get(batch, **({**site.spoken, "forbidden": forbidden(run.settings, site)} if site else {}))
    system.script(spec)  # raises for a value that it cannot carry
    return spec, system


def make_log_folder(path: str | None) -> None:
    """Make the log folder as dask-jobqueue does; without it Slurm fails a job, "JobLaunchFailure" (22.05.8).

    A folder that only the nodes have cannot be made here, and one with a pattern of sbatch's (``%u``) has another name.
    """
    if path and "%" not in path:
        with contextlib.suppress(OSError):
            parents.make(Path(path))
