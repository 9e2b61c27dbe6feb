"""A run of a batch system, as one cluster object has it: submitted or taken up, written down, guarded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.config import document
from hpcgpu.deploy.cluster.session import Session
from hpcgpu.deploy.jobs import guard, record
from hpcgpu.deploy.jobs.job import BatchJob, Job, SubmittedJob
from hpcgpu.deploy.jobs.job_plan import plan_job
from hpcgpu.deploy.jobs.local import LocalJob
from hpcgpu.deploy.jobs.record import Gone, Process, Record, RecordedJob, Run
from hpcgpu.deploy.network import lease, scheduler_file
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import local_launch
from hpcgpu.errors import LaunchError
from hpcgpu.host.run import end
from hpcgpu.model import JobSpec, Patience, RunDocument, Started
from hpcgpu.plan.jobs.reconcile import Policy
from hpcgpu.plan.jobs.request import workers_per_node
from hpcgpu.spill.storage import parents
from hpcgpu.supervise import tasks


class BatchRun:
    """The job with the scheduler, and what outlives the cluster object: the run's record and its guard.

    On the event loop's thread only; properties may be read by any thread.

    Parameters
    ----------
    batch : str
        Name of the batch system.
    wanted : Wanted
        Settings and site.
    patience : Patience
        With the batch system.
    attached : Run, optional
        A run that is there, to be taken up in place of a submission.
    takes_over : bool
        The run ends with this object, and not with the one that submitted it.

    Attributes
    ----------
    job : Job or None
        The one with the scheduler; None before the submission.

    """

    def __init__(
        self,
        batch: str,
        wanted: Wanted,
        patience: Patience,
        *,
        attached: Run | None = None,
        takes_over: bool = False,
    ) -> None:
        self.wanted = wanted
        self.job: Job | None = None
        self._batch, self._patience = batch, patience
        self._attached, self._takes_over = attached, takes_over
        self._folder: Path | None = None
        self._written: Record | None = None
        self._guard: Started | None = None

    @property
    def expected(self) -> int:
        """Workers of the job that has the scheduler."""
        settings = self.wanted.settings
        here = settings.shape == "elastic" and settings.scheduler == "here"
        return 0 if here else settings.nodes * workers_per_node(settings)

    @property
    def is_attached(self) -> bool:
        """Whether another process submitted the job."""
        return self._attached is not None

    async def start(self, session: Session, say: Callable[[str], None]) -> Job:
        """Submit the job, or find that of the run to be taken up; the session has the run's folder from here on.

        Parameters
        ----------
        session : Session
            Takes the lease.
        say : callable
            Takes a line for the user: what the job is doing.

        Raises
        ------
        SubmitError
            The batch system refused, in its own words.
        JobError, LaunchError
            The run to be taken up has ended, or has no job with a scheduler.

        """
        if self._attached:
            return await self._take_up(self._attached, session, say)
        folder = self._folder = scheduler_file.make_folder(record.home())
        session.begin(folder)
        run = RunDocument(settings=self.wanted.settings, shape="gang", meeting=str(folder))
        job = self.job = await asyncio.to_thread(self._make_job, run, say)  # it may look for launchers
        await self._submit(job, run, folder)
        return job

    def _make_job(self, run: RunDocument, say: Callable[[str], None]) -> Job:
        if self.expected:
            return BatchJob(*plan_job(run, self.wanted.site, self._batch), say, self._patience)
        return LocalJob(local_launch(replace(run, shape="head")), {}, Path(run.meeting))

    async def _submit(self, job: Job, run: RunDocument, folder: Path) -> None:
        """Submit, with a guard and a record that are there before the job is."""
        site = self.wanted.site
        self._written = Record(
            name=run.settings.job_name,
            batch=self._batch,
            dialect=site.dialect if site else {},
            document=document.render(run),
            shape=run.settings.shape,
            client=Process.here(),
            created=record.now(),
        )
        await tasks.in_thread(self.write_down)
        _make_log_folder(run.settings.log_directory)
        self._guard = guard.start(folder, self._written.client)
        await job.submit()
        await tasks.in_thread(self.write_down)

    async def _take_up(self, run: Run, session: Session, say: Callable[[str], None]) -> Job:
        self._folder, self._written = run.folder, run.record
        heads = [job for job in run.record.jobs if job.kind == "head"]
        if not heads:
            raise LaunchError(
                f"run {run.record.name} in {run.folder} has no job with a scheduler: it has not been submitted yet, or "
                "the scheduler is beside the process that made it (scheduler='here')"
            )
        session.join(run.folder)
        job = self.job = SubmittedJob(heads[0], run.record.system, say)
        await job.check()
        return job

    async def connected(self, session: Session) -> None:
        """Take the run over if that is wanted; not before, since an object without a connection must not end it."""
        if self._takes_over:
            assert self._folder
            me = Process.here()
            self._written = replace(await asyncio.to_thread(record.read, self._folder), client=me)
            record.write(self._folder, self._written)
            lease.take_up(self._folder)
            self._guard, session.keeps_job = guard.start(self._folder, me), False

    def member_request(self) -> tuple[BatchSystem, JobSpec, Policy, int]:
        """Return batch system, request, limits and workers of a job that comes and goes."""
        assert self._written
        settings = self.wanted.settings
        run = RunDocument(settings=settings, shape="member", meeting=str(self._folder))
        spec, _, _ = plan_job(run, self.wanted.site, self._batch)
        policy = Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s, patience=self._patience)
        return self._written.system, spec, policy, workers_per_node(settings)

    def write_down(
        self, members: Sequence[RecordedJob] = (), gone: Sequence[Gone] = (), *, submitting: bool = False
    ) -> None:
        """Bring the record up to date.

        Parameters
        ----------
        members : sequence of RecordedJob
            The jobs beside the first one.
        gone : sequence of Gone
            The last few of these that ended unasked.
        submitting : bool
            The answer to a submission of these is awaited, or was lost.

        """
        assert self._folder
        assert self._written
        with contextlib.suppress(FileNotFoundError):  # the process that took the run over stays its client
            self._written = replace(self._written, client=record.read(self._folder).client)
        job = self.job
        is_submitted = isinstance(job, SubmittedJob)
        head = (job.recorded,) if isinstance(job, SubmittedJob) and job.id else ()
        self._written = replace(
            self._written,
            jobs=(*head, *members),
            gone=tuple(gone),
            submitting=submitting or (is_submitted and not head),
        )
        record.write(self._folder, self._written)

    def written_down(self) -> tuple[tuple[RecordedJob, ...], tuple[Gone, ...]]:
        """Return the jobs beside the first one, and those that are gone, as any object has written them down last."""
        assert self._folder
        try:
            written = record.read(self._folder)
        except FileNotFoundError:  # somebody has stopped the run
            return (), ()
        return tuple(job for job in written.jobs if job.kind == "member"), written.gone

    def ended(self) -> None:
        """Do nothing: all that is left of the run lies in its folder."""

    async def close(self) -> None:
        """End the guard: nothing is left for it, or another process has one."""
        if self._guard:
            await asyncio.to_thread(end, self._guard)
            self._guard = None


def _make_log_folder(path: str | None) -> None:
    """Make it as dask-jobqueue does: Slurm fails a job that has none, and says "JobLaunchFailure" (22.05.8).

    A folder that only the nodes have cannot be made here, and one with a pattern of sbatch's (``%u``) has another name.
    """
    if path and "%" not in path:
        with contextlib.suppress(OSError):
            parents.make(Path(path))
