"""From a run to the job that a batch system is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import BatchSystem, get
from hpcgpu.config import document, doors
from hpcgpu.config.validation import check_submission
from hpcgpu.deploy import settings
from hpcgpu.errors import ConfigError
from hpcgpu.host import log, process
from hpcgpu.model import JobSpec, RunDocument, Site
from hpcgpu.plan.jobs.request import plan_member, plan_request


def job_script(given: Mapping[str, object], given_from: str, script: tuple[str, ...], batch: str | None) -> str:
    """Return the job script for a script, or for a cluster object without one.

    Raises
    ------
    ConfigError
        A setting is wrong or missing, or no batch system was given.

    """
    wanted = settings.read(given, given_from, batch or "", doors.JOBSCRIPT if script else "")
    name = batch or (wanted.site.batch if wanted.site else "")
    if not name:
        raise ConfigError(
            "which batch system? Give --batch slurm or --batch pbs, or --site for a machine that is known"
        )
    shape, meeting = ("in-allocation", "") if script else ("gang", "FOLDER-OF-THIS-RUN")
    run_document = RunDocument(settings=wanted.settings, shape=shape, script=script, meeting=meeting)
    spec, text, system = plan_job(run_document, wanted.site, name)
    for note in system.notes(spec):
        log.say(f"job {spec.name}: {note}")
    return text


def mark_of(folder: Path) -> str:
    """Return the mark that all jobs of a run have in the batch system; it finds jobs whose ids were lost."""
    return f"hpcgpu-{folder.name}"


def plan_job(run: RunDocument, site: Site | None, batch: str) -> tuple[JobSpec, str, BatchSystem]:
    """Return the request for a run's job, its script, and the batch system that understands both.

    Raises
    ------
    ConfigError
        Something is missing that the batch system or the site needs.

    """
    if site and site.batch != batch:
        raise ConfigError(
            f"site {site.name} has {site.batch}, not {batch}: take the class of {site.batch} (hpcgpu jobscript: leave "
            f"--batch out), or another site= than that of {run.settings.where('site')}"
        )
    check_submission(run.settings, site)
    run = replace(run, settings=settings.in_job(run.settings, site, batch))
    plan = plan_member if run.shape == "member" else plan_request
    words = ("launch", "--document", document.render(run))
    spec = plan(run.settings, process.python_argv("hpcgpu", *words, python=run.settings.python or ""))
    if run.meeting:  # PBS forgets a job with its end unless the site has switched its history on
        spec = replace(spec, exit_file=f"{run.meeting}/exit", mark=mark_of(Path(run.meeting)))
    system = get(batch, **(site.dialect if site else {}))
    return spec, system.script(spec), system
