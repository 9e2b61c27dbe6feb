"""Plan a job: its request in the batch system of its site, from the settings of its user."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpcgpu import config
from hpcgpu.batch import BatchSystem, get
from hpcgpu.config import entry_points
from hpcgpu.config.sites.rules import check_submission, forbidden, notes
from hpcgpu.deploy import settings
from hpcgpu.errors import ConfigError, opt
from hpcgpu.host import log, process
from hpcgpu.model import JobSpec, RunDocument, Site
from hpcgpu.plan.jobs.request import plan_request


class PlannedJob(NamedTuple):
    """A job before its submission."""

    user: settings.Wanted  # its settings, site and batch system's name
    spec: JobSpec
    system: BatchSystem


def read_job(
    options: Mapping[str, object], given_from: str, script: tuple[str, ...], batch: str | None, *, live: bool = False
) -> PlannedJob:
    """Plan the job for a script, or for a cluster object without one; ConfigError for a wrong or missing setting."""
    user = settings.read(options, given_from, batch or "", entry_points.JOBSCRIPT if script else "", live=live)
    if not user.batch:
        raise ConfigError("no batch system is given; add --batch slurm or --batch pbs, or --site for a known machine")
    shape, folder = ("in-allocation", "") if script else ("gang", "FOLDER-OF-THIS-RUN")
    run_document = RunDocument(settings=user.settings, shape=shape, script=script, folder=folder)
    spec, system = plan_job(run_document, user.site, user.batch)
    for note in system.notes(spec):
        log.say(f"job {spec.name}: {note}")
    return PlannedJob(user, spec, system)


def mark_of(folder: Path) -> str:
    """Return the mark of all jobs of a run in the batch system; it finds jobs whose ids were lost."""
    return f"hpcgpu-{folder.name}"


def plan_job(
    run: RunDocument, site: Site | None, batch: str, arguments: tuple[str, ...] = ()
) -> tuple[JobSpec, BatchSystem]:
    """Return the request for a run's job, which calls hpcgpu with ``arguments`` (or launch), and its system.

    Raises ConfigError if a setting is missing that the batch system or the site requires.
    """
    if site and site.batch != batch:
        raise ConfigError(
            f"site {site.name} has {site.batch}, not {batch}: take the class of {site.batch} (hpcgpu plan: leave "
            f"--batch out), or another {opt('site')} than that of {run.settings.where('site')}"
        )
    check_submission(run.settings, site, member=run.shape == "member")
    if run.shape != "member":
        for note in notes(run.settings, site):
            log.say(note)
    run = replace(run, settings=settings.in_job(run.settings, site, batch))
    document = "" if arguments else config.render_document(run)
    arguments = arguments or ("launch", "--document")
    argv = process.python_argv("hpcgpu", *arguments, python=run.settings.python or process.original(sys.executable))
    spec = replace(plan_request(run.settings, argv), document=document)
    if run.shape == "member":
        spec = replace(spec, nodes=1)
    if run.folder:  # PBS forgets a job at its end unless the site has switched its history on
        spec = replace(spec, exit_file=f"{run.folder}/exit", mark=mark_of(Path(run.folder)))
    system = get(batch, **({**site.spoken, "forbidden": forbidden(run.settings, site)} if site else {}))
    system.script(spec)  # raises for a value that it cannot carry
    return spec, system
