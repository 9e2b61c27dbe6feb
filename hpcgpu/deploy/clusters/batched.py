"""Clusters in jobs of a batch system: written down, guarded, detached and attached."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from distributed.core import Status

from hpcgpu.config import document
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.clusters.cluster import GPUCluster
from hpcgpu.deploy.jobs import guard, record, runs
from hpcgpu.deploy.jobs.job import BatchJob, Job, SubmittedJob
from hpcgpu.deploy.jobs.record import Gone, Process, Record, RecordedJob, Run
from hpcgpu.deploy.jobs.submit import plan_job
from hpcgpu.deploy.network import lease
from hpcgpu.deploy.network.lease import keep_touched
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host.run import end
from hpcgpu.model import JobState, RunDocument, Started
from hpcgpu.spill.storage import parents


class BatchGPUCluster(GPUCluster):
    """A cluster that is one job of a batch system."""

    batch: ClassVar[str]
    _guard: Started | None = None
    _attached: Run | None = None
    _takes_over = False
    _written: Record | None = None

    @classmethod
    def attach(cls, name_or_jobid: str, *, shutdown_on_close: bool = False, asynchronous: bool = False) -> Self:
        """Return the cluster of a run that another process has submitted: one that was detached, or not yet lost.

        Any process of yours may attach that sees the same home folder. It waits for a job that is still pending.

        Parameters
        ----------
        name_or_jobid : str
            As ``hpcgpu ps`` shows them.
        shutdown_on_close : bool
            Take the cluster over: its job ends with this object. Else the job goes on as it was when this
            object is closed; :meth:`shutdown` ends it.
        asynchronous : bool
            True inside a running event loop: ``async with``, or ``await`` the object.

        Raises
        ------
        ConfigError
            There is no such run, there are several, or it is one of another batch system.
        JobError
            Its job has ended.
        LaunchError
            Its scheduler does not answer.

        """
        run = runs.find(record.home(), str(name_or_jobid))
        if run.record.batch != cls.batch:
            raise ConfigError(f"{name_or_jobid} is a run of {run.record.batch}; {cls.__name__} is for {cls.batch}")
        cluster = cls.__new__(cls)
        cluster._make(Wanted(run.record.run.settings, None), asynchronous=asynchronous)
        cluster._attached, cluster._keep_job, cluster._takes_over = run, True, shutdown_on_close
        cluster._begin()
        return cluster

    def _read(self, given: dict[str, Any]) -> Wanted:
        return wanted_settings.read(given, f"keyword {{name}} of {type(self).__name__}", self.batch)

    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        return BatchJob(*plan_job(run, self._wanted.site, self.batch), self._log, self.patience)

    async def _start_job(self) -> None:
        if self._attached is None:
            await super()._start_job()
        else:
            await self._take_up(self._attached)

    async def _submit(self, job: Job, run: RunDocument, folder: Path) -> None:
        """Submit, with a guard and a record that are there before the job is."""
        site = self._wanted.site
        self._written = Record(
            name=run.settings.job_name,
            batch=self.batch,
            dialect=site.dialect if site else {},
            document=document.render(run),
            shape=run.settings.shape,
            client=Process.here(),
            created=record.now(),
        )
        self._write_down()
        _make_log_folder(run.settings.log_directory)
        self._guard = guard.start(folder, self._written.client)
        await job.submit()
        self._write_down()

    def _write_down(self) -> None:
        """Bring the record up to date."""
        assert self._folder
        assert self._written
        with contextlib.suppress(FileNotFoundError):  # who takes a cluster over is its client from then on
            self._written = replace(self._written, client=record.read(self._folder).client)
        head = (self._job.recorded,) if isinstance(self._job, SubmittedJob) and self._job.id else ()
        self._written = replace(
            self._written, jobs=(*head, *self._members()), gone=self._gone(), submitting=self._submitting
        )
        record.write(self._folder, self._written)

    @property
    def _submitting(self) -> bool:
        """Whether the answer to a submission is awaited, or was lost."""
        return isinstance(self._job, SubmittedJob) and not self._job.id

    def _members(self) -> tuple[RecordedJob, ...]:
        """Return the jobs beside the first one."""
        return ()

    def _gone(self) -> tuple[Gone, ...]:
        """Return the last few of these that ended unasked."""
        return ()

    async def _take_up(self, run: Run) -> None:
        """Connect to the scheduler of a run that is there; hold its lease, unless it was detached and stays so."""
        folder = self._folder = run.folder
        heads = [job for job in run.record.jobs if job.kind == "head"]
        if not heads:
            raise LaunchError(
                f"run {run.record.name} in {folder} has no job with a scheduler: it has not been submitted yet, or the "
                "scheduler is beside the process that made it (scheduler='here')"
            )
        self._written = run.record
        self._touching = keep_touched(folder, self.settings.client_grace_s)
        self._job = SubmittedJob(heads[0], run.record.system, self._log)
        await self._job.check()
        await self._connect()
        if self._takes_over:  # not before: who cannot reach the cluster must not end it
            me = Process.here()
            self._written = replace(record.read(folder), client=me)
            record.write(folder, self._written)
            lease.take_up(folder)
            self._guard, self._keep_job = guard.start(folder, me), False

    async def _detach(self) -> None:
        folder = self._folder
        assert folder
        assert self._job
        if not isinstance(self._job, SubmittedJob):
            raise ConfigError("scheduler='here': the scheduler dies with this process, so it cannot be detached")
        lease.detach(folder)
        try:
            if self._holder:
                await self._holder.detach()
        except (OSError, TimeoutError) as e:
            lease.take_up(folder)
            raise LaunchError(f"job {self.job_id} was not detached: its scheduler does not answer ({e})") from e
        self._keep_job = True
        if self.status == Status.starting and self._starting:
            self._starting.cancel()
        else:
            await self._close()

    def _closed_words(self) -> str:
        ended = self._job and self._job.status and self._job.status.state is JobState.ENDED
        if not self._keep_job or self._end or ended:
            return super()._closed_words()
        attach = f"{type(self).__name__}.attach({self.job_id!r})"
        return f"{'closed' if self._attached else 'detached'}: job {self.job_id} goes on, {attach} takes it up"

    async def _close(self) -> None:
        await super()._close()
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
