"""A run of a batch system, as one cluster object has it: submitted or taken up, looked after, ended.

More than 300 lines, since a cluster object asks all of this of one thing: its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.cluster.run import Run
from hpcgpu.deploy.cluster.scaler import Scaler
from hpcgpu.deploy.cluster.seen import Seen
from hpcgpu.deploy.cluster.session import Session
from hpcgpu.deploy.cluster.written_run import WrittenRun
from hpcgpu.deploy.jobs import record
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.job import BatchJob, Head, Job, submit_guarded
from hpcgpu.deploy.jobs.job_loop import ClusterHooks, JobLoop
from hpcgpu.deploy.jobs.job_plan import plan_job
from hpcgpu.deploy.jobs.job_table import Present
from hpcgpu.deploy.jobs.local import LocalJob
from hpcgpu.deploy.jobs.rows import Jobs, head_row, jobs_of, member_row
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import local_launch
from hpcgpu.errors import ConfigError, HpcGpuError, JobError, LaunchError
from hpcgpu.model import JobState, Patience, RunDocument
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.reconcile import Policy
from hpcgpu.plan.jobs.request import first_workers, workers_per_node
from hpcgpu.supervise import tasks


class BatchRun(Run):
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
    attached : record.Run, optional
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
        attached: record.Run | None = None,
        takes_over: bool = False,
    ) -> None:
        super().__init__(wanted)
        self.scales = wanted.settings.shape == "elastic"
        self._loop: JobLoop | None = None
        self._fleet: Fleet | None = None
        self._seen: Seen | None = None
        self._scaler: Scaler | None = None
        self._batch, self._patience = batch, patience
        self._attached, self._takes_over = attached, takes_over
        self._folder: Path | None = None
        self._written: WrittenRun | None = None

    @property
    def expected(self) -> int:
        """Workers of the job that has the scheduler."""
        return first_workers(self.wanted.settings)

    @property
    def wanted_workers(self) -> int:
        """How many workers there are to be: those of the first job, and of all that come and go."""
        return self.expected + (self._scaler.wanted_workers if self._scaler else 0)

    @property
    def requested_workers(self) -> int:
        """Of those, the workers whose jobs have been submitted."""
        return self.expected + (self._scaler.requested_workers if self._scaler else 0)

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None when they may."""
        trouble = self._loop.trouble if self._loop else ""
        given_up = self._scaler.given_up if self._scaler else None
        return given_up or (JobError(trouble) if trouble else None)

    @property
    def ready_words(self) -> str:
        """A line for a cluster that has its scheduler and, as was wanted, no workers."""
        none = "READY scheduler here; no workers yet: cluster.scale(n) or cluster.adapt() asks for them"
        return "" if self.expected else none

    @property
    def head(self) -> Head:
        """How the job with the scheduler is; it has been submitted."""
        if isinstance(self.job, LocalJob):
            return self.job
        assert self._loop
        return self._loop

    @property
    def _head_facts(self) -> JobFacts:
        """The facts about the job with the scheduler."""
        if isinstance(self.job, LocalJob):
            return self.job.facts
        known = self._loop.head if self._loop else None
        return known or JobFacts(id=self.job.id if self.job else "", submitted_s=0.0, expected=self.expected)

    @property
    def jobs(self) -> Jobs:
        """All jobs with their workers of this moment: the loop looks a little later, for many of them at once."""
        if self.job is None or self._seen is None:
            return jobs_of([], (), is_over=False)
        present, end = self._present(), self._seen.end()

        def with_workers(job: JobFacts) -> JobFacts:
            here = present.get(job.id, Present())
            return job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent)

        head = head_row(with_workers(self._head_facts), self.wanted.settings.nodes, self.job.log, end)
        members = self._loop.table.members if self._loop else ()
        rows = [head, *(member_row(with_workers(row.facts), row.recorded.log, end) for row in members)]
        return jobs_of(rows, self._fleet.gone if self._fleet else (), is_over=end is not None)

    def explain(self) -> str:
        """Return the plan of the submitted job; of a run that was taken up, the settings."""
        if not isinstance(self.job, BatchJob) or not self.job.spec:
            return wanted_settings.explain(self.wanted.settings)
        from hpcgpu.deploy.jobs import preview  # brings what reads machines, which no other call needs
        from hpcgpu.plan.views.preview import render

        return render(preview.of_job(self.wanted, self.job.spec, self.job.script))

    async def start(self, session: Session, seen: Seen) -> Job:
        """Submit the job, or find that of the run to be taken up; the session has the run's folder from here on.

        Parameters
        ----------
        session : Session
            Takes the lease.
        seen : Seen
            The cluster.

        Raises
        ------
        SubmitError
            The batch system refused, in its own words.
        JobError, LaunchError
            The run to be taken up has ended, or has no job with a scheduler.

        """
        self._seen = seen
        if self._attached:
            return await self._take_up(self._attached, session, seen.say)
        folder = self._folder = await session.begin(lambda: scheduler_file.make_folder(record.home()))
        run = RunDocument(settings=self.wanted.settings, shape="gang", folder=str(folder))
        job = self.job = await asyncio.to_thread(self._make_job, run, seen.say)  # it may look for launchers
        await self._submit(job, run)
        self._look_after(job)
        return job

    def _look_after(self, job: Job) -> None:
        assert self._written
        assert self._seen
        settings, seen = self.wanted.settings, self._seen
        policy = Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s, patience=self._patience)
        hooks = ClusterHooks(
            present=self._present,
            retire=seen.retire,
            remove=seen.remove,
            write_down=self._write_down,
            written_down=self._written.members,
            changed=seen.changed,
            say=seen.say,
        )
        self._loop = JobLoop(self._written.system, policy, hooks)
        if isinstance(job, BatchJob):
            self._loop.add_head(job.recorded, self.expected, job.spec)

    def _present(self) -> dict[str, Present]:
        assert self._seen
        head = self.job.id if isinstance(self.job, BatchJob) else ""
        return self._seen.present(head, elastic=self.wanted.settings.shape == "elastic")

    def _make_job(self, run: RunDocument, say: Callable[[str], None]) -> Job:
        if self.expected:
            spec, _, system = plan_job(run, self.wanted.site, self._batch)
            return BatchJob(system, say, spec=spec, patience=self._patience)
        return LocalJob(local_launch(replace(run, shape="head")), {}, Path(run.folder))

    async def _submit(self, job: Job, run: RunDocument) -> None:
        """Submit, with a guard and a record that are there before the job is."""
        self._written = WrittenRun(Path(run.folder), record.Record.begin(run, self._batch, self.wanted.site))
        await submit_guarded(job, run.settings.log_directory, self._write_down, self._written.start_guard)

    async def _take_up(self, run: record.Run, session: Session, say: Callable[[str], None]) -> Job:
        self._folder, self._written = run.folder, WrittenRun(run.folder, run.record)
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
        """Take the run over if that is wanted; not before, since an object without a connection must not end it.

        Raises
        ------
        JobError
            It cannot be known which object controls the jobs that come and go.

        """
        if self._takes_over:
            assert self._written
            await tasks.to_thread(self._written.take_over)
            session.keeps_job = False
        if self.scales:
            assert self._seen
            self._scaler = Scaler(self._make_fleet(), self._seen)
            await self._scaler.started()

    def elastic(self) -> Scaler:
        """Return the scaler of the jobs that come and go.

        Raises
        ------
        ConfigError
            None do.

        """
        if self._scaler is None:
            raise ConfigError(
                f"this cluster is one job of fixed size (nodes={self.wanted.settings.nodes}): start it with "
                "shape='elastic' to scale it, or start another one with nodes=…"
            )
        return self._scaler

    def ready(self, workers: int) -> None:
        """Note that the start is over."""
        del workers
        if self._loop:
            self._loop.ready()

    def workers_changed(self) -> None:
        """Have the loop look."""
        if self._loop:
            self._loop.alarm.ring()

    def check_detachable(self) -> None:
        """Raise ConfigError where the scheduler is a child of this process."""
        if not isinstance(self.job, BatchJob):
            raise ConfigError("scheduler='here': the scheduler dies with this process, so it cannot be detached")

    def goes_on(self, kind: str) -> str:
        """Return what a job that its object leaves goes on as; empty if it has ended."""
        job = self._head_facts
        if job.state is JobState.ENDED:
            return ""
        left = "closed" if self._attached else "detached"
        return f"{left}: job {job.id} goes on, {kind}.attach({job.id!r}) takes it up"

    def stop(self) -> None:
        """Look after the jobs no longer; they stay."""
        if self._scaler:
            self._scaler.stop()
        elif self._loop:
            self._loop.stop()

    async def end(self) -> None:
        """Have all jobs end.

        Raises
        ------
        SubmitError
            Some could not be cancelled.

        """
        try:
            if self._scaler:
                await self._scaler.close()
        finally:
            await super().end()

    def _make_fleet(self) -> Fleet:
        """Return the jobs that come and go: none yet, or those that are written down."""
        assert self._loop
        settings = self.wanted.settings
        run = RunDocument(settings=settings, shape="member", folder=str(self._folder))
        spec, _, _ = plan_job(run, self.wanted.site, self._batch)
        self._fleet = Fleet(self._loop, spec, workers_per_node(settings))
        return self._fleet

    def _write_down(self) -> None:
        """Bring the record up to date."""
        assert self._written
        job, fleet = self.job, self._fleet
        is_submitted = isinstance(job, BatchJob)
        head = (job.recorded,) if isinstance(job, BatchJob) and job.id else ()
        self._written.write(
            (*head, *(fleet.recorded if fleet else ())),
            fleet.gone if fleet else (),
            submitting=(fleet is not None and fleet.submitting) or (is_submitted and not head),
        )

    async def ended(self) -> None:
        """Do nothing: all that is left of the run lies in its folder."""

    async def close(self) -> None:
        """End the guard: nothing is left for it, or another process has one."""
        if self._written:
            await self._written.close()
