"""A run of a batch system, as one cluster object has it: submitted or taken up, looked after, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.cluster.run import Run, SchedulerView
from hpcgpu.deploy.cluster.scaler import Scaler
from hpcgpu.deploy.cluster.written_run import WrittenRun
from hpcgpu.deploy.jobs import ending, record
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.job_loop import ClusterHooks, JobLoop
from hpcgpu.deploy.jobs.job_plan import plan_job
from hpcgpu.deploy.jobs.job_table import NO_WORKERS, JobTable, JobWorkers
from hpcgpu.deploy.jobs.local import LocalRanks
from hpcgpu.deploy.jobs.rows import Jobs, today
from hpcgpu.deploy.jobs.submitter import Submitter, submit_guarded
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import local_launch
from hpcgpu.errors import ConfigError, HpcGpuError, JobError, LaunchError
from hpcgpu.model import JobSpec, JobState, Patience, RunDocument
from hpcgpu.plan.jobs.job import HEAD, Job, Phase
from hpcgpu.plan.jobs.phase import describe
from hpcgpu.plan.jobs.reconcile import Policy
from hpcgpu.plan.jobs.request import first_workers, workers_per_node
from hpcgpu.supervise import tasks


class BatchRun(Run):
    """The job with the scheduler, or its processes here; member jobs; the run's record and its guard.

    ``attached`` is a run to take up in place of a submission; with ``takes_over`` it ends with this object.
    """

    def __init__(
        self, user: Wanted, patience: Patience, *, attached: record.Run | None = None, takes_over: bool = False
    ) -> None:
        super().__init__(user)
        self.scales, self.takes_over = user.settings.shape == "elastic", takes_over
        self._batch, self._patience, self._attached = user.batch, patience, attached
        self._spec: JobSpec | None = None
        self._submitter: Submitter | None = None
        self._loop: JobLoop | None = None
        self._fleet: Fleet | None = None
        self._view: SchedulerView | None = None
        self._scaler: Scaler | None = None
        self._written: WrittenRun | None = None
        if attached:
            self.folder = attached.folder
            if not any(job.is_head for job in attached.record.jobs):
                raise LaunchError(
                    f"run {attached.record.name} in {attached.folder} has no job with a scheduler: it has not been "
                    "submitted yet, or the scheduler is beside the process that made it (scheduler='here')"
                )

    @property
    def job(self) -> Job | None:
        """The job with the scheduler; None before its submission."""
        return super().job if self._ranks else self._loop.head if self._loop else None

    @property
    def trouble(self) -> str:
        """Why the jobs are not looked after at present; "" if they are."""
        return self._loop.trouble if self._loop else ""

    @property
    def expected(self) -> int:
        """The number of workers of the job that has the scheduler."""
        return first_workers(self.settings)

    @property
    def wanted_workers(self) -> int:
        """The number of workers that the cluster is to have: of the first job, and of all that come and go."""
        return self.expected + (self._scaler.wanted_workers if self._scaler else 0)

    @property
    def requested_workers(self) -> int:
        """The workers, of these, whose jobs have been submitted."""
        return self.expected + (self._scaler.requested_workers if self._scaler else 0)

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None if they may."""
        given_up = self._scaler.given_up if self._scaler else None
        return given_up or (JobError(self.trouble) if self.trouble else None)

    @property
    def ready_line(self) -> str:
        """A line for a cluster that has its scheduler and, as requested, no workers."""
        none = "READY scheduler here; no workers yet: request them by cluster.scale(n) or cluster.adapt()"
        return "" if self.expected else none

    @property
    def jobs(self) -> Jobs:
        """All jobs with their present workers: the loop checks a little later, for many workers at once."""
        head = self.job
        if head is None or self._view is None:
            return Jobs(())
        present, end = self._present(), self._view.end()

        def described(job: Job) -> Job:
            here = present.get(job.id, NO_WORKERS)
            job = job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent)
            return describe(job, today(), end)

        table = self._loop.table if self._loop else JobTable(0)
        rows = [described(job) for job in (head, *table.members)]
        if not head.expected and not end:
            rows[0] = replace(rows[0], phase=Phase.UP, text=Phase.UP.value)
        ended = [job for job in rows if end and job.phase is Phase.GONE]
        unasked = [describe(job, today()) for job in table.gone]
        return Jobs(tuple(job for job in rows if job not in ended), (*ended, *unasked))

    def explain(self) -> str:
        """Return the plan of the submitted job; of a run that was taken up, the settings."""
        if not self._spec:
            return wanted_settings.explain(self.settings)
        from hpcgpu.deploy.jobs import preview  # brings what reads machines, which no other call needs
        from hpcgpu.report.job import render

        return render(preview.of_job(Wanted(self.settings, self.site), self._spec, self.script))

    def make_folder(self) -> Path:
        """Make the run's folder; called in a thread."""
        return scheduler_file.make_folder(record.home())

    async def start(self, folder: Path, view: SchedulerView) -> None:
        """Submit the job with the scheduler, or take up the job of another object's run."""
        self.folder, self._view = folder, view
        if self._attached:
            run = self._attached.record
            loop = self._look_after(WrittenRun(folder, run), view)
            job = next(job for job in run.jobs if job.is_head)
            loop.add_head(replace(job, nodes=self.settings.nodes), self.expected, None)
            await self.news()
            return
        run_document = RunDocument(settings=self.settings, shape="gang", folder=str(folder))
        await asyncio.to_thread(self._prepare, run_document, view.say)  # it may search for launchers
        written = WrittenRun(folder, record.Record.begin(run_document, self._batch, self.site))
        self._look_after(written, view)
        await submit_guarded(self._submit, self.settings.log_directory, self._write_down, written.start_guard)

    def _prepare(self, run: RunDocument, say: Callable[[str], None]) -> None:
        if not self.expected:
            self._ranks = LocalRanks(local_launch(replace(run, shape="head")), {}, Path(run.folder))
            self.script = self._ranks.script
            return
        self._spec, system = plan_job(run, self.site, self._batch)
        self.script = system.script(self._spec)
        self._submitter = Submitter(system, self._spec, lambda text: say(f"job -: {text}"), self._patience, role=HEAD)

    async def _submit(self) -> None:
        if self._ranks:
            await self._ranks.start()
        if self._submitter and self._loop:
            self._loop.add_head(await self._submitter.submit_head(), self.expected, self._spec)

    def _look_after(self, written: WrittenRun, view: SchedulerView) -> JobLoop:
        settings, self._written = self.settings, written
        policy = Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s, patience=self._patience)
        hooks = ClusterHooks(
            present=self._present,
            retire=view.retire,
            remove=view.remove,
            write_down=self._write_down,
            written_down=written.members,
            changed=view.changed,
            say=view.say,
        )
        self._loop = JobLoop(written.system, policy, hooks)
        return self._loop

    def _present(self) -> dict[str, JobWorkers]:
        assert self._view
        head = self._loop.head if self._loop else None
        return self._view.present(head.id if head else "", elastic=self.scales)

    async def connected(self) -> None:
        """Take the run over if requested; not before, since an object without a connection must not end it.

        Raises JobError if it cannot be known which object controls the jobs that come and go.
        """
        if self.takes_over and self._written:
            await tasks.to_thread(self._written.take_over)
        if self.scales and self._view and self._loop:
            run = RunDocument(settings=self.settings, shape="member", folder=str(self.folder))
            spec, _ = plan_job(run, self.site, self._batch)
            self._fleet = Fleet(self._loop, spec, workers_per_node(self.settings))
            self._scaler = Scaler(self._fleet, self._view)
            await self._scaler.started()

    def elastic(self) -> Scaler:
        """Return the scaler of the jobs that come and go; raise ConfigError if the cluster has a fixed size."""
        if self._scaler is None:
            raise ConfigError(
                f"this cluster is one job of fixed size (nodes={self.settings.nodes}): start it with "
                "shape='elastic' to scale it, or start another one with nodes=…"
            )
        return self._scaler

    async def check(self) -> Job:
        """Return the job with the scheduler; raise JobError, with the tail of its log, when it has ended."""
        return await (super().check() if self._ranks or not self._loop else self._loop.check())

    async def news(self) -> Job:
        """Return the job with the scheduler after a new poll of the batch system; raise as :meth:`check`."""
        return await (super().check() if self._ranks or not self._loop else self._loop.news())

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of the job with the scheduler."""
        if self._ranks or not self._loop or not self.job:
            return argv
        return self._loop.system.onto(self.job.id, node, argv)

    def ready(self, workers: int) -> None:
        """Record the end of the start."""
        del workers
        if self._loop:
            self._loop.ready()

    def workers_changed(self) -> None:
        """Check the jobs soon: workers have come or gone."""
        if self._loop:
            self._loop.alarm.ring()

    def check_detachable(self) -> None:
        """Raise ConfigError if the scheduler is a child of this process."""
        if self._ranks:
            raise ConfigError("scheduler='here': the scheduler dies with this process, so it cannot be detached")

    def goes_on(self, kind: str) -> str:
        """Return a line about a job that its object leaves running; "" if it ends."""
        job = self.job
        if job is None or job.state is JobState.ENDED:
            return ""
        left = "closed" if self._attached else "detached"
        return f"{left}: job {job.id} goes on, {kind}.attach({job.id!r}) takes it up"

    def stop(self) -> None:
        """Stop looking after the jobs, which stay."""
        if self._scaler:
            self._scaler.stop()
        elif self._loop:
            self._loop.stop()

    async def end(self) -> None:
        """End all jobs; raise SubmitError if some could not be cancelled."""
        try:
            if self._scaler:
                await self._scaler.close()
        finally:
            await super().end()
            if not self._ranks and self._loop and self._view:
                await ending.close_head(self._loop.system, self.job, self._view.say, self._submitter)

    def _write_down(self) -> None:
        assert self._written
        table = self._loop.table if self._loop else None
        unanswered = self._fleet is not None and self._fleet.submitting
        unanswered |= self._submitter is not None and (table is None or table.head is None)
        self._written.write(table.jobs if table else (), table.gone if table else (), submitting=unanswered)

    async def close(self) -> None:
        """End the guard: no job is left, or another process has a guard."""
        if self._written:
            await self._written.close()
