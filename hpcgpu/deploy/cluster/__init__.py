"""The run of one cluster object: processes of this machine, or jobs of a batch system, submitted or taken up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import shlex
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from hpcgpu import supervise
from hpcgpu.deploy import jobs as runs
from hpcgpu.deploy.dask_config import dask_environ
from hpcgpu.deploy.jobs.batch_client import plan_job, submit_guarded
from hpcgpu.deploy.jobs.fleet import Fleet, SchedulerView
from hpcgpu.deploy.jobs.runs import Jobs, log_tail, today
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import ld_preload, local_launch
from hpcgpu.errors import ConfigError, HpcGpuError, JobError, LaunchError
from hpcgpu.host import log, private, process, remover
from hpcgpu.host.path_writers import changed_by
from hpcgpu.host.scratch import Scratch, make_private
from hpcgpu.launch import HOST_FILES, SEEN_OF_A_JOB, RankCommand
from hpcgpu.model import JobSpec, JobState, JobStatus, Patience, RunDocument
from hpcgpu.plan.jobs import HEAD, NO_WORKERS, OUTLIVES, Job, Phase, describe
from hpcgpu.plan.jobs.request import Policy, first_workers, workers_per_node
from hpcgpu.units import format_duration

# A job whose lease has ended is gone within 5 s.
_LOCAL_END_S = 10.0


class LocalRanks:
    """The ranks as processes of this machine, which die with this process."""

    def __init__(
        self,
        launch: RankCommand,
        environ: Mapping[str, str],  # added for the ranks
        folder: Path,  # the run's
        log_directory: str | None = None,  # keeps the log; None: it lies in the run's folder, and goes with it
        preload: str = "",  # library that the ranks preload
    ) -> None:
        self.id = ""
        variables = (f"{name}={shlex.quote(value)} " for name, value in launch.env)
        self.script = f"{''.join(variables)}{shlex.join(launch.argv)}\n"
        self._preload = preload
        self._launch, self._environ, self._keeps = launch, environ, log_directory is not None
        self._folder, self._log = folder, Path(log_directory or folder) / "hpcgpu.log"
        self.log = str(self._log)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def job(self) -> Job:
        """The ranks as a job; their number of workers is unknown."""
        status = JobStatus(JobState.RUNNING, "running")
        if self._process and self._process.returncode is not None:
            status = JobStatus(JobState.ENDED, "", "", self._process.returncode)
        return Job(id=self.id, role=HEAD, log=self.log, nodes=0, status=status)

    async def start(self) -> None:
        """Start the ranks; raise LaunchError if the program does not exist or its log cannot be written."""
        environ, parent = self._env(), os.getpid()
        try:
            with await supervise.to_thread(self._open_log) as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._launch.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    # Out of the process group of a notebook's kernel: an interrupted cell leaves the cluster.
                    start_new_session=True,
                    preexec_fn=functools.partial(process.die_with_parent, parent, signal.SIGTERM),
                )
        except OSError as e:
            raise LaunchError(
                f"the ranks could not be started ({e}): check python= and launcher=, which start them, and "
                "log_directory=, which has their log"
            ) from e
        self.id = str(self._process.pid)

    def _open_log(self) -> BinaryIO:
        make_private(self._log.parent)
        return private.open_new(self._log)

    def _env(self) -> dict[str, str]:
        """Return the ranks' environment, without the batch job that this process may be in."""
        outside = {
            name: value for name, value in os.environ.items() if not name.startswith((*SEEN_OF_A_JOB, *HOST_FILES))
        }
        environ = {**outside, **process.rank_env(outside, self._preload), **dict(self._launch.env), **self._environ}
        return {**environ, **self._launch.within(str(self._folder), environ)}

    async def check(self) -> Job:
        """Return the ranks as a job; raise JobError when they have ended."""
        if self._process and self._process.returncode is not None:
            end = await asyncio.to_thread(log_tail, self._log, kept=self._keeps)
            raise JobError(f"the ranks ended with exit code {self._process.returncode}; make a new cluster\n{end}")
        return self.job

    async def end(self, *, at_once: bool) -> None:
        """End the ranks: they see that the client is gone, and get a SIGTERM if they take long, then a SIGKILL."""
        if self._process is None or self._process.returncode is not None:
            return
        if at_once:  # no client has been there
            self._process.terminate()
        for force in (self._process.terminate, self._process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _LOCAL_END_S)
                return
            force()
        await self._process.wait()


class ClusterRun:
    """The processes or jobs of one cluster object, which calls it on its event loop; any thread may read properties."""

    def __init__(
        self,
        user: Wanted,
        patience: Patience,
        *,
        environ: Mapping[str, str] | None = None,  # added for processes of this machine
        attached: runs.Run | None = None,  # to take up in place of a submission
        takes_over: bool = False,  # this object becomes its owner
    ) -> None:
        self.settings, self.site, self.takes_over = user.settings, user.site, takes_over
        self.scales = bool(user.batch) and user.settings.shape == "elastic"  # whether jobs come and go
        self.script = ""  # of the job with the scheduler, or its command; "": not made here
        self._batch, self._patience, self._environ = user.batch, patience, environ or {}
        self._run = attached
        self._ranks: LocalRanks | None = None
        self._scratch: Scratch | None = None
        self._fleet: Fleet | None = None
        self._view: SchedulerView | None = None
        self._spec: JobSpec | None = None
        self._ready_workers = 0

    @property
    def folder(self) -> Path | None:
        """The folder of a run that another object has begun; None until :meth:`make_folder` has made it."""
        return self._run.folder if self._run else None

    @property
    def job(self) -> Job | None:
        """The job with the scheduler; None before its submission."""
        if self._ranks:
            return self._ranks.job if self._ranks.id else None
        return self._run.head if self._fleet and self._run else None

    @property
    def label(self) -> str:
        """The job with the scheduler, for people: ``job 123``, ``this machine``."""
        return "this machine" if self._ranks else f"job {self.job.id if self.job else '-'}"

    @property
    def limit(self) -> str:
        """For people, that an elastic cluster ends with its first job; "" if it has no limit."""
        limit_s = (self.job.limit_s if self.job else None) or self.settings.walltime_s
        if not self.scales or self._ranks or not limit_s:
            return ""
        return f"the cluster ends with {self.label}, its first, {format_duration(limit_s)} after that began; {OUTLIVES}"

    @property
    def trouble(self) -> str:
        """Why the jobs are not looked after at present; "" if they are."""
        return self._fleet.trouble if self._fleet else ""

    @property
    def first_workers(self) -> int:
        """The number of workers of the job that has the scheduler; of processes of this machine, when it was ready."""
        return first_workers(self.settings) if self._batch else self._ready_workers

    @property
    def member_workers(self) -> int:
        """The number of workers of each job that comes and goes."""
        return workers_per_node(self.settings) if self.scales else 0

    @property
    def wanted_workers(self) -> int:
        """The number of workers that the cluster is to have: of the first job, and of all that come and go."""
        return self.first_workers + (self._run.target * self.member_workers if self._run else 0)

    @property
    def requested_workers(self) -> int:
        """The workers, of these, whose jobs have been submitted."""
        return self.first_workers + (len(self._run.members) * self.member_workers if self._run else 0)

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None if they may."""
        return (self._fleet and self._fleet.error) or (JobError(self.trouble) if self.trouble else None)

    @property
    def jobs(self) -> Jobs:
        """All jobs with their present workers: the fleet checks a little later, for many workers at once."""
        head, fleet = self.job, self._fleet
        if head is None or fleet is None or self._view is None:
            return Jobs(())
        present, end = fleet.present(), self._view.end()

        def described(job: Job) -> Job:
            here = present.get(job.id, NO_WORKERS)
            job = job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent)
            return describe(job, today(), end)

        rows = [described(job) for job in (head, *fleet.run.members)]
        if not head.expected and not end:
            rows[0] = replace(rows[0], phase=Phase.UP, text=Phase.UP.value)
        ended = [job for job in rows if end and job.phase is Phase.GONE]
        unasked = [describe(job, today()) for job in fleet.run.gone]
        return Jobs(tuple(job for job in rows if job not in ended), (*ended, *unasked))

    def explain(self) -> str:
        """Return the plan of the submitted job; of other runs the settings, and the command."""
        from hpcgpu.deploy import preview  # both bring what reads machines, which no other call needs
        from hpcgpu.report.job import render, settings_table

        if not self._spec:
            text = settings_table(self.settings).to_text()
            return text if self._batch else f"{text}\n{self.script}"
        return render(preview.of_job(Wanted(self.settings, self.site), self._spec, self.script))

    def make_folder(self) -> Path:
        """Make the run's folder; called in a thread."""
        if self._batch:
            home = runs.home()
            if who := changed_by(home):
                log.say(f"{home} is not safe for the files of a run: {who}, and so end it; chmod go-w that folder")
            return scheduler_file.make_folder(home)
        settings = self.settings
        self._scratch = Scratch.make(settings.local_directory, "client", trusted=settings.trust_local_directory)
        remover.start(str(self._scratch.lock_path))  # the kernel frees the lock when this process ends
        return scheduler_file.make_folder(self._scratch.path)

    async def start(self, folder: Path, view: SchedulerView) -> None:
        """Submit the job with the scheduler, take up an existing one, or start processes; or raise HpcGpuError."""
        self._view = view
        settings = self.settings
        policy = Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s, patience=self._patience)
        if self._run:
            self._fleet = Fleet(self._run, policy, view)
            self._fleet.start()
            await self.check(poll=True)
            return
        document = RunDocument(settings=settings, shape="gang", folder=str(folder))
        if not self._batch:
            self._ranks = await asyncio.to_thread(self._plan_ranks, document)
            await self._ranks.start()
            return
        run = self._run = runs.Run.begin(document, self._batch, self.site)
        fleet = self._fleet = Fleet(run, policy, view)
        if self.first_workers:
            spec, system = await asyncio.to_thread(plan_job, document, self.site, self._batch)
            self._spec, self.script = spec, system.script(spec)
            await submit_guarded(run, functools.partial(fleet.submit_head, system, spec))
        else:
            self._ranks = await asyncio.to_thread(self._plan_ranks, replace(document, shape="head"))
            await submit_guarded(run, self._ranks.start)

    def _plan_ranks(self, document: RunDocument) -> LocalRanks:
        settings, launch, folder = self.settings, local_launch(document), Path(document.folder)  # it searches launchers
        if self._batch:
            ranks = LocalRanks(launch, {}, folder)
        else:
            environ = {**dask_environ(), **self._environ}
            ranks = LocalRanks(launch, environ, folder, settings.log_directory, ld_preload(settings))
        self.script = ranks.script
        return ranks

    async def connected(self) -> None:
        """Take the run over if requested; not before, since an object without a connection must not end it."""
        if not self._run or not self._fleet:
            return
        document = RunDocument(settings=self.settings, shape="member", folder=str(self._run.folder))
        spec = plan_job(document, self.site, self._batch)[0] if self.scales else None
        if self.takes_over:
            await supervise.to_thread(self._run.take_over)
        if spec:
            self._fleet.manage_members(spec)

    def ready(self, workers: int) -> None:
        """Record the number of workers at the end of the start."""
        self._ready_workers = workers
        if self._fleet:
            self._fleet.ready()

    async def check(self, *, poll: bool = False) -> Job:
        """Return the job with the scheduler, after a poll if asked; JobError, with its log's tail, if it has ended."""
        if self._ranks:
            return await self._ranks.check()
        assert self._fleet
        return await (self._fleet.news() if poll else self._fleet.check())

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of the job with the scheduler."""
        if self._ranks or not self._run or not self.job:
            return argv
        return self._run.system.onto(self.job.id, node, argv)

    def workers_changed(self) -> None:
        """Check the jobs soon: workers have come or gone."""
        if self._fleet:
            self._fleet.alarm.ring()

    def check_elastic(self) -> None:
        """Raise ConfigError if the cluster has a fixed size."""
        if not self.scales:
            raise ConfigError(
                f"this cluster is one job of fixed size (nodes={self.settings.nodes}): start it with "
                "shape='elastic' to scale it, or start another one with nodes=…"
            )

    def members_for(self, workers: int) -> int:
        """Return the number of jobs beside the first that are necessary for a cluster of so many workers."""
        return max(0, math.ceil((workers - self.first_workers) / self.member_workers))

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Set the number of jobs that come and go; see :meth:`Fleet.scale`."""
        assert self._fleet
        await self._fleet.scale(jobs, adapting=adapting)

    async def is_mine(self) -> bool:
        """Return whether the run ends with this object: it has no other owner."""
        if self._run:
            with contextlib.suppress(OSError):  # a file server that is away
                await supervise.to_thread(self._run.look)
        return self._run is None or self._run.is_mine

    async def claim(self, action: str) -> None:
        """Raise JobError if another object that is alive owns the run; take over a run whose owner has left it."""
        if self._run and not await self.is_mine():
            await supervise.to_thread(self._run.claim, action)

    async def check_detachable(self) -> None:
        """Raise ConfigError if the job cannot go on without this process, JobError if another object owns it."""
        if not self._batch:
            raise ConfigError("the processes of a local cluster die with this one: it cannot be detached")
        if self._ranks:
            raise ConfigError("scheduler='here': the scheduler dies with this process, so it cannot be detached")
        await self.claim("detach")

    def goes_on(self, kind: str) -> str:
        """Return a line about a job that its object leaves running; "" if it ends. ``kind``: the object's class."""
        job = self.job
        if self._ranks or job is None or job.state is JobState.ENDED:
            return ""
        left = "detached" if self._run and self._run.is_mine else "closed"
        return f"{left}: job {job.id} goes on, {kind}.attach({job.id!r}) takes it up"

    def stop(self) -> None:
        """Stop looking after the jobs, which stay. It may be called again."""
        if self._fleet:
            self._fleet.stop()

    async def end(self) -> bool:
        """End all jobs; SubmitError if some could not be cancelled. False: the batch system may start one again."""
        try:
            if self._fleet and self.scales:
                await self._fleet.close()
        finally:
            if self._ranks:
                await self._ranks.end(at_once=not self._view or self._view.scheduler() is None)
            are_gone = await self._fleet.close_head() if self._fleet and not self._ranks else True
        return are_gone

    async def close(self, *, are_gone: bool = True) -> None:
        """Remove the leftovers of processes here, and end the guard, unless it is to look after a job that may return.

        ``are_gone``: no job is left, or another process has one.
        """
        if self._scratch:
            await supervise.to_thread(self._scratch.remove)
            self._scratch = None
        if self._run:
            await asyncio.to_thread(self._run.end_guard)
            if not are_gone and self._run.is_mine:
                await asyncio.to_thread(self._run.start_guard, at_once=True)
