"""Plan the jobs of a run, and submit them in as few submissions as the site allows and a limit admits, losing none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgpu import supervise
from hpcgpu.batch import BatchSystem, get
from hpcgpu.config import document, entry_points
from hpcgpu.config.sites import check_submission, forbidden, notes
from hpcgpu.deploy import settings
from hpcgpu.deploy.jobs.batch_client import look, submit
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.host import log, process
from hpcgpu.model import JobSpec, Patience, RunDocument
from hpcgpu.plan.jobs import HEAD, MEMBER, Job
from hpcgpu.plan.jobs.request import plan_member, plan_request
from hpcgpu.spill import storage

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


async def submit_guarded(run: Run, submit_job: Callable[[], Awaitable[object]]) -> None:
    """Submit the first job of a run, with its record and its guard in place before the job exists.

    Raises SubmitError in the batch system's words.
    """
    await supervise.to_thread(run.save)
    # As dask-jobqueue does; without it Slurm fails a job, "JobLaunchFailure" (22.05.8). A folder that only the nodes
    # have cannot be made here, and one with a pattern of sbatch's (%u) has another name.
    logs = run.document.settings.log_directory
    if logs and "%" not in logs:
        with contextlib.suppress(OSError):
            await supervise.to_thread(functools.partial(storage.make_private, Path(logs)))
    await supervise.to_thread(run.start_guard)
    await submit_job()
    run.submitting = False
    await supervise.to_thread(run.save)


class Submitter:
    """Submits one request: for the job with the scheduler (HEAD), or for jobs that join it (MEMBER).

    Each submission of members has an exit file beside ``spec.exit_file``. ``write`` records that a submission is under
    way: jobs may appear after a client that was killed during it. ``say`` takes a line for the user.
    """

    def __init__(
        self,
        system: BatchSystem,
        spec: JobSpec,
        say: Callable[[str], None],
        patience: Patience,
        *,
        write: Callable[[], Awaitable[None]] | None = None,
        role: str = MEMBER,
    ) -> None:
        self._system, self._spec, self._say, self._patience = system, spec, say, patience
        self._write, self._role = write, role
        self._number = 0
        self._asking = False
        self.unsure: SubmitError | None = None  # why an answer was lost, until its jobs are found

    @property
    def unanswered(self) -> bool:
        """True if the answer to a submission is awaited, or was lost."""
        return self._asking or self.unsure is not None

    async def submit_head(self) -> Job:
        """Submit the job with the scheduler; raise SubmitError in the batch system's words."""
        for note in self._system.notes(self._spec):
            self._say(note)
        (job,) = [job async for jobs in self.submit(1, ()) for job in jobs]
        return job

    async def submit(self, count: int, past_ids: Collection[str]) -> AsyncIterator[list[Job]]:
        """Submit ``count`` jobs; yield the jobs of each accepted submission.

        If a limit of this user's admits fewer jobs, groups of descending powers of two are submitted. Raises
        SubmitError if some were refused; the accepted ones have been yielded.
        """
        for part in self._system.split(count):
            try:
                yield await self._submit_array(part, past_ids)
            except SubmitError as e:
                if not e.over_limit:
                    raise
                left = part - 1
                while left:
                    size = 1 << (left.bit_length() - 1)
                    left = size - 1
                    try:
                        accepted = await self._submit_array(size, past_ids)
                    except SubmitError as again:
                        if not again.over_limit:
                            raise
                    else:
                        yield accepted
                raise

    async def lost(self, past_ids: Collection[str]) -> list[Job]:
        """Return existing jobs whose ids were lost in an unanswered submission; [] without one.

        Raises SubmitError if the batch system does not answer now.
        """
        if not self.unsure:
            return []
        ids = await look(self._system, self._spec.name, self._spec.mark, past_ids)
        if ids:
            self.unsure = None
        return [self.lost_job(job_id) for job_id in ids]

    def lost_job(self, job_id: str) -> Job:
        """Return a job whose id was lost."""
        return self._job(job_id, self._spec, self._spec.exit_file if self._role == HEAD else "")

    async def _submit_array(self, count: int, past_ids: Collection[str]) -> list[Job]:
        spec = replace(self._spec, count=count)
        if self._role == MEMBER:
            self._number += 1
            spec = replace(spec, exit_file=f"{spec.exit_file}-{self._number}")
        self._asking = True
        try:
            if self._write:
                await self._write()
            ids = await self._answered(spec, past_ids)
        finally:
            self._asking = False
        files = [spec.exit_file] * len(ids)
        if spec.count > 1:  # of jobs that were found later, while some of the array are missing, the index is unknown
            files = [f"{spec.exit_file}.{i}" if len(ids) == spec.count else "" for i in range(len(ids))]
        return [self._job(job_id, spec, file) for job_id, file in zip(ids, files, strict=True)]

    async def _answered(self, spec: JobSpec, past_ids: Collection[str]) -> Sequence[str]:
        try:
            return await submit(self._system, spec, self._system.script(spec), self._say, self._patience, past_ids)
        except SubmitError as e:
            self.unsure = e if e.unsure else self.unsure
            raise
        except BaseException:
            # a close of the cluster interrupted it: the answer is lost
            self.unsure = SubmitError("the submission was given up before it was answered", unsure=True)
            raise

    def _job(self, job_id: str, spec: JobSpec, exit_file: str) -> Job:
        log = str(Path(self._system.log(spec, job_id)).absolute())
        return Job(id=job_id, role=self._role, log=log, exit_file=exit_file, nodes=spec.nodes)
