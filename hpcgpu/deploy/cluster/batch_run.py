"""The run of a cluster of a batch system: its jobs, submitted or taken up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from dataclasses import replace
from pathlib import Path

from hpcgpu import config, supervise
from hpcgpu.deploy import jobs as runs
from hpcgpu.deploy.cluster.local_run import LocalRun
from hpcgpu.deploy.jobs.batch_client import submit_guarded
from hpcgpu.deploy.jobs.fleet import Fleet, SchedulerView
from hpcgpu.deploy.jobs.planned_job import PlannedJob, plan_job
from hpcgpu.deploy.jobs.runs import Jobs, today
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import ConfigError, HpcGpuError, JobError
from hpcgpu.host import limits, log
from hpcgpu.host.path_writers import changed_by
from hpcgpu.model import JobSpec, JobState, Patience, RunDocument, Settings
from hpcgpu.plan.jobs.job import MEMBER, NO_WORKERS, Job, Phase
from hpcgpu.plan.jobs.job_text import OUTLIVES, describe
from hpcgpu.plan.jobs.needs import OF_NODES, Size, shortages
from hpcgpu.plan.jobs.reconcile import Policy
from hpcgpu.plan.jobs.request import first_workers, workers_per_node
from hpcgpu.units import format_duration


class BatchRun:
    """The jobs of one cluster object, which calls it on its event loop; any thread may read properties.

    With ``scheduler="here"`` the scheduler is a process of this machine.
    """

    def __init__(
        self,
        user: Wanted,
        patience: Patience,
        attached: runs.Run | None = None,  # to take up in place of a submission
        *,
        takes_over: bool = False,  # this object becomes its owner
    ) -> None:
        self.settings, self._user = user.settings, user
        self.scales = user.settings.shape == "elastic"  # whether jobs come and go
        self.first_workers = first_workers(user.settings)  # of the job with the scheduler
        self.member_workers = workers_per_node(user.settings) if self.scales else 0  # of each job that comes and goes
        self.script = ""  # of the job with the scheduler, or its command; "": not made here
        self._patience, self._policy = patience, _policy(user.settings, patience)
        self._plans: dict[str, PlannedJob] = {}  # of the jobs of each pool
        self._run, self._takes_over = attached, takes_over
        self._local: LocalRun | None = None  # the scheduler, if it is here
        self._fleet: Fleet | None = None
        self._spec: JobSpec | None = None  # of the submitted job

    @property
    def fleet(self) -> Fleet:
        """The jobs; AssertionError before :meth:`start`."""
        assert self._fleet
        return self._fleet

    @property
    def job(self) -> Job | None:
        """The job with the scheduler; None before its submission."""
        if self._local:
            return self._local.job
        return self._run.head if self._run else None

    @property
    def label(self) -> str:
        """The job with the scheduler, for people: ``job 123``, ``this machine``."""
        return "this machine" if self._local else f"job {self.job.id if self.job else '-'}"

    @property
    def limit(self) -> str:
        """For people, that an elastic cluster ends with its first job; "" if it has no limit."""
        head = self._run and self._run.head
        limit_s = head and (head.limit_s or self.settings.walltime_s)
        if not self.scales or not limit_s:
            return ""
        return f"the cluster ends with {self.label}, its first, {format_duration(limit_s)} after that began; {OUTLIVES}"

    @property
    def wanted_workers(self) -> int:
        """The number of workers that the cluster is to have: of the first job, and of all that come and go."""
        return sum(map(self.workers_of, ("", *self.pools)))

    @property
    def requested_workers(self) -> int:
        """The workers, of these, whose jobs have been submitted."""
        members = self._run.members if self._run else ()
        return self.first_workers + sum(self.per_job(job.pool) for job in members)

    @property
    def pools(self) -> tuple[str, ...]:
        """The names of the pools."""
        return tuple(self._run.pools) if self._run else ()

    def per_job(self, pool: str) -> int:
        """Return the number of workers of each job of a pool."""
        return self._run.expected_of(MEMBER, pool) if self._run and pool else self.member_workers

    def settings_of(self, pool: str) -> Settings:
        """Return the settings of a pool's jobs."""
        assert self._run
        return config.read_document(self._run.pools[pool].document).settings if pool else self.settings

    def jobs_of(self, pool: str) -> int:
        """Return the number of jobs that come and go of a pool."""
        return self._run.target_of(pool) if self._run else 0

    def workers_of(self, pool: str) -> int:
        """Return the number of workers that a pool is to have; the first job's are among the cluster's own, ""."""
        here = 0 if pool else self.first_workers
        return here + (self._run.target_of(pool) * self.per_job(pool) if self._run else 0)

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come, or their jobs are not looked after at present; None if they may come."""
        if not (fleet := self._fleet):
            return None
        return fleet.error or (JobError(fleet.trouble) if fleet.trouble else None)

    @property
    def jobs(self) -> Jobs:
        """All jobs with their present workers: the fleet checks a little later, for many workers at once."""
        head, fleet = self.job, self._fleet
        if head is None or fleet is None:
            return Jobs(())
        present, end = fleet.present(), fleet.view.end()

        def described(job: Job) -> Job:
            here = present.get(job.id, NO_WORKERS)
            job = job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent)
            return describe(job, today(), end)

        rows = [described(job) for job in (head, *fleet.run.members)]
        if not head.expected and not end:
            rows[0] = replace(rows[0], phase=Phase.UP, text=Phase.UP.value)
        ended = [job for job in rows if end and job.phase is Phase.GONE]
        gone = [describe(job, today()) for job in fleet.run.gone]
        return Jobs(tuple(job for job in rows if job not in ended), (*ended, *gone))

    def explain(self, pool: str = "") -> str:
        """Return the plan of the submitted job, or of a pool's jobs; of other runs the settings."""
        from hpcgpu.deploy import preview  # both bring what reads machines, which no other call needs
        from hpcgpu.report.job import render, settings_table

        if pool and (planned := self._plans.get(pool)):
            script = planned.system.script(planned.spec)
            return render(preview.of_job(planned.user, planned.spec, script, has_scheduler=False))
        if pool or not self._spec:
            return settings_table(self.settings_of(pool)).to_text()
        return render(preview.of_job(self._user, self._spec, self.script))

    def make_folder(self) -> Path:
        """Make the run's folder, or return that of an existing run; called in a thread."""
        if self._run:
            return self._run.folder
        home = runs.home()
        if who := changed_by(home):
            log.say(f"{home} is not safe for the files of a run: {who}, and so end it; chmod go-w that folder")
        return scheduler_file.make_folder(home)

    async def start(self, folder: Path, view: SchedulerView) -> None:
        """Submit the job with the scheduler, or take up an existing one; raise HpcGpuError if this is not possible."""
        user, document = self._user, RunDocument(settings=self.settings, shape="gang", folder=str(folder))
        run = self._run = self._run or runs.Run.begin(document, user.batch, user.site)
        fleet = self._fleet = Fleet(run, self._policy, view)
        if run.head:
            fleet.start()
            await self.check(poll=True)
        elif self.first_workers:
            spec, system = await asyncio.to_thread(plan_job, document, user.site, user.batch)
            self._spec, self.script = spec, system.script(spec)
            size = Size(self.first_workers, self.settings.nodes, workers_per_node(self.settings))
            for text in shortages(size, await asyncio.to_thread(limits.read)):
                view.say(f"{text}{OF_NODES}")
            await submit_guarded(run, functools.partial(fleet.submit_head, system, spec))
        else:
            self._local = LocalRun(self.settings, {}, "head")
            await submit_guarded(run, functools.partial(self._local.start, folder, view))
            self.script = self._local.script

    async def ready(self, workers: int) -> None:
        """Take the run over if requested; not before, since an object without a connection must not end it."""
        fleet, user = self.fleet, self._user
        spec = plan_job(self._document_of(self.settings), user.site, user.batch)[0] if self.scales else None
        if self._takes_over:
            await supervise.to_thread(fleet.run.take_over)
        if spec:
            fleet.manage_members(spec, self._policy)
        for name, pool in fleet.run.pools.items():  # of the owner before
            settings = config.read_document(pool.document).settings
            await self._manage(name, Wanted(settings, None, user.batch))
        fleet.ready()

    async def add_pool(self, name: str, user: Wanted) -> None:
        """Look after jobs of another kind, of which none is requested yet; ConfigError for an impossible request."""
        fleet = self.fleet
        document = config.render_document(self._document_of(user.settings))
        fleet.run.pools[name] = runs.Pool(document=document, workers=workers_per_node(user.settings))
        try:
            await self._manage(name, user)
        except BaseException:
            del fleet.run.pools[name]
            raise
        await fleet.write()

    async def _manage(self, name: str, user: Wanted) -> None:
        spec, system = await asyncio.to_thread(plan_job, self._document_of(user.settings), user.site, user.batch)
        self._plans[name] = PlannedJob(user, spec, system)
        self.fleet.manage_members(spec, _policy(user.settings, self._patience), name)

    def _document_of(self, settings: Settings) -> RunDocument:
        return RunDocument(settings=settings, shape="member", folder=str(self.fleet.run.folder))

    async def check(self, *, poll: bool = False) -> Job:
        """Return the job with the scheduler, after a poll if asked; JobError, with its log's tail, if it has ended."""
        if self._local:
            return await self._local.check()
        return await (self.fleet.news() if poll else self.fleet.check())

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of the job with the scheduler."""
        run = self.fleet.run
        return run.system.onto(run.head.id, node, argv) if run.head else argv

    def workers_changed(self) -> None:
        """Check the jobs soon: workers have come or gone."""
        self.fleet.alarm.ring()

    def must_own(self, action: str) -> None:
        """Raise JobError if another object owned the run at the last look."""
        if self._run and not self._run.is_mine:
            self._run.must_own(action)

    def members_for(self, workers: int, pool: str = "") -> int:
        """Return the number of a pool's jobs that come and go, for so many workers of it."""
        return max(0, math.ceil((workers - (0 if pool else self.first_workers)) / self.per_job(pool)))

    async def is_mine(self) -> bool:
        """Return whether the run ends with this object: it has no other owner."""
        if self._run is None:
            return True
        with contextlib.suppress(OSError):  # a file server that is away
            await supervise.to_thread(self._run.look)
        return self._run.is_mine

    async def claim(self, action: str) -> None:
        """Raise JobError if another object that is alive owns the run; take over a run whose owner has left it.

        ConfigError: the job cannot go on without this process, and ``action`` is "detach".
        """
        if action == "detach" and self._local:
            raise ConfigError("scheduler='here': the scheduler dies with this process, so it cannot be detached")
        if self._run and not await self.is_mine():
            await supervise.to_thread(self._run.claim, action)

    def stop(self) -> None:
        """Stop looking after the jobs, which stay. It may be called again."""
        if self._fleet:
            self._fleet.stop()

    async def leave(self, kind: str) -> str:
        """End the guard, since the jobs go on; return a line about them, "" if they do not. ``kind``: the class."""
        if not (run := self._run):
            return ""
        await supervise.in_thread(run.end_guard)
        if not (job := run.head) or job.state is JobState.ENDED:
            return ""
        left = "detached" if run.is_mine else "closed"
        return f"{left}: job {job.id} goes on, {kind}.attach({job.id!r}) takes it up"

    async def end(self) -> bool:
        """End all jobs; SubmitError if some could not be cancelled.

        False: the batch system may start one again, which a guard looks after.
        """
        if not (fleet := self._fleet):
            return True
        try:
            if self.scales:
                await fleet.close()
        finally:
            if self._local:
                await self._local.end()
            are_gone = await fleet.close_head()
        await supervise.in_thread(fleet.run.end_guard)
        if not are_gone and fleet.run.is_mine:
            await supervise.in_thread(fleet.run.start_guard, at_once=True)
        return are_gone


def _policy(settings: Settings, patience: Patience) -> Policy:
    return Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s, patience=patience)


ClusterRun = LocalRun | BatchRun  # of a cluster object, whose class chooses: two classes with one interface
