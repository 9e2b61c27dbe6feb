"""A run of a batch system, as one cluster object has it: submitted or taken up, written down, guarded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcgpu.config import document
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.cluster.seen import Seen
from hpcgpu.deploy.cluster.session import Session
from hpcgpu.deploy.jobs import guard, record
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.job import BatchJob, Head, Job
from hpcgpu.deploy.jobs.job_loop import ClusterHooks, JobLoop
from hpcgpu.deploy.jobs.job_plan import make_log_folder, plan_job
from hpcgpu.deploy.jobs.job_table import Present, Row
from hpcgpu.deploy.jobs.local import LocalJob
from hpcgpu.deploy.jobs.record import Gone, Process, Record, RecordedJob, Run
from hpcgpu.deploy.network import lease, scheduler_file
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import local_launch
from hpcgpu.errors import LaunchError
from hpcgpu.host.run import end
from hpcgpu.model import Patience, RunDocument, Started
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.reconcile import Policy
from hpcgpu.plan.jobs.request import first_workers, workers_per_node
from hpcgpu.supervise import tasks


class BatchRun:
    """The job with the scheduler, and the parts that outlive the cluster object: the run's record and its guard.

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
    seen : Seen or None
        The cluster; set before the start.
    loop : JobLoop or None
        Looks after all jobs; None before the submission.
    fleet : Fleet or None
        The jobs that come and go; None before the connection, and where none do.

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
        self.seen: Seen | None = None
        self.loop: JobLoop | None = None
        self.fleet: Fleet | None = None
        self._batch, self._patience = batch, patience
        self._attached, self._takes_over = attached, takes_over
        self._folder: Path | None = None
        self._written: Record | None = None
        self._guard: Started | None = None

    @property
    def expected(self) -> int:
        """Workers of the job that has the scheduler."""
        return first_workers(self.wanted.settings)

    @property
    def is_attached(self) -> bool:
        """Whether another process submitted the job."""
        return self._attached is not None

    @property
    def head(self) -> Head:
        """How the job with the scheduler is; it has been submitted."""
        if isinstance(self.job, LocalJob):
            return self.job
        assert self.loop
        return self.loop

    @property
    def head_facts(self) -> JobFacts:
        """The facts about the job with the scheduler."""
        if isinstance(self.job, LocalJob):
            return self.job.facts
        known = self.loop.head if self.loop else None
        return known or JobFacts(id=self.job.id if self.job else "", submitted_s=0.0, expected=self.expected)

    def now(self) -> tuple[JobFacts, list[Row]]:
        """Return all jobs with their workers of this moment: the loop looks a little later, for many of them at once.

        Returns
        -------
        JobFacts
            The one with the scheduler.
        list of Row
            Those that come and go.

        """
        present = self._present()

        def with_workers(job: JobFacts) -> JobFacts:
            here = present.get(job.id, Present())
            return job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent)

        members = self.loop.table.members if self.loop else ()
        return with_workers(self.head_facts), [replace(row, facts=with_workers(row.facts)) for row in members]

    def explain(self) -> str:
        """Return the plan of the submitted job; of a run that was taken up, the settings."""
        if not isinstance(self.job, BatchJob) or not self.job.spec:
            return wanted_settings.explain(self.wanted.settings)
        from hpcgpu.deploy.jobs import preview  # brings what reads machines, which no other call needs
        from hpcgpu.plan.views.preview import render

        return render(preview.of_job(self.wanted, self.job.spec, self.job.script))

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
        folder = self._folder = await session.begin(lambda: scheduler_file.make_folder(record.home()))
        run = RunDocument(settings=self.wanted.settings, shape="gang", folder=str(folder))
        job = self.job = await asyncio.to_thread(self._make_job, run, say)  # it may look for launchers
        await self._submit(job, run)
        self._look_after(job)
        return job

    def _look_after(self, job: Job) -> None:
        assert self._written
        assert self.seen
        settings, seen = self.wanted.settings, self.seen
        policy = Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s, patience=self._patience)
        hooks = ClusterHooks(
            present=self._present,
            retire=seen.retire,
            remove=seen.remove,
            write_down=self.write_down,
            written_down=self.written_down,
            changed=seen.changed,
            say=seen.say,
        )
        self.loop = JobLoop(self._written.system, policy, hooks)
        if isinstance(job, BatchJob):
            self.loop.lead(job.recorded, self.expected, job.spec)

    def _present(self) -> dict[str, Present]:
        assert self.seen
        head = self.job.id if isinstance(self.job, BatchJob) else ""
        return self.seen.present(head, elastic=self.wanted.settings.shape == "elastic")

    def _make_job(self, run: RunDocument, say: Callable[[str], None]) -> Job:
        if self.expected:
            spec, _, system = plan_job(run, self.wanted.site, self._batch)
            return BatchJob(system, say, spec=spec, patience=self._patience)
        return LocalJob(local_launch(replace(run, shape="head")), {}, Path(run.folder))

    async def _submit(self, job: Job, run: RunDocument) -> None:
        """Submit, with a guard and a record that are there before the job is."""
        site = self.wanted.site
        self._written = Record(
            name=run.settings.job_name,
            batch=self._batch,
            dialect=site.spoken if site else {},
            document=document.render(run),
            shape=run.settings.shape,
            client=Process.here(),
            created=record.now(),
        )
        await tasks.in_thread(self.write_down)
        await tasks.in_thread(lambda: make_log_folder(run.settings.log_directory))
        await tasks.in_thread(self._start_guard)
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
        job = self.job = BatchJob(run.record.system, say, heads[0])
        self._look_after(job)
        await self.head.news()
        return job

    async def connected(self, session: Session) -> None:
        """Take the run over if that is wanted; not before, since an object without a connection must not end it."""
        if self._takes_over:
            await tasks.in_thread(self._take_over)
            session.keeps_job = False

    def _take_over(self) -> None:
        assert self._folder
        self._written = replace(record.read(self._folder), client=Process.here())
        record.write(self._folder, self._written)
        lease.take_up(self._folder)
        self._start_guard()

    def _start_guard(self) -> None:
        assert self._folder
        assert self._written
        self._guard = guard.start(self._folder, self._written.client)

    def make_fleet(self) -> Fleet:
        """Return the jobs that come and go: none yet, or those that are written down."""
        assert self.loop
        settings = self.wanted.settings
        run = RunDocument(settings=settings, shape="member", folder=str(self._folder))
        spec, _, _ = plan_job(run, self.wanted.site, self._batch)
        self.fleet = Fleet(self.loop, spec, workers_per_node(settings))
        return self.fleet

    def write_down(self) -> None:
        """Bring the record up to date."""
        assert self._folder
        assert self._written
        with contextlib.suppress(FileNotFoundError):  # the process that took the run over stays its client
            self._written = replace(self._written, client=record.read(self._folder).client)
        job, fleet = self.job, self.fleet
        is_submitted = isinstance(job, BatchJob)
        head = (job.recorded,) if isinstance(job, BatchJob) and job.id else ()
        self._written = replace(
            self._written,
            jobs=(*head, *(fleet.recorded if fleet else ())),
            gone=fleet.gone if fleet else (),
            submitting=(fleet is not None and fleet.submitting) or (is_submitted and not head),
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

    async def ended(self) -> None:
        """Do nothing: all that is left of the run lies in its folder."""

    async def close(self) -> None:
        """End the guard: nothing is left for it, or another process has one."""
        if self._guard:
            await asyncio.to_thread(end, self._guard)
            self._guard = None
