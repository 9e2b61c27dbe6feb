"""The cluster classes of the batch systems."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from distributed.core import Status

from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.cluster.batch_run import BatchRun
from hpcgpu.deploy.cluster.cluster import GPUCluster
from hpcgpu.deploy.cluster.scaler import JobAdaptive, Scaler, bounds, check_scale, workers_with
from hpcgpu.deploy.cluster.seen import Seen
from hpcgpu.deploy.jobs import record, runs
from hpcgpu.deploy.jobs.job import BatchJob
from hpcgpu.deploy.jobs.rows import JobRow, Jobs, head_row, jobs_of, member_row
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import ConfigError, HpcGpuError, JobError
from hpcgpu.model import JobState
from hpcgpu.plan.jobs.phase import JobView


class BatchGPUCluster(GPUCluster):
    """A cluster of one job of a batch system, to which one-node jobs come and go where ``shape="elastic"``."""

    batch: ClassVar[str]
    _run: BatchRun
    _scaler: Scaler | None = None

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
        found = runs.find(record.home(), str(name_or_jobid))
        if found.record.batch != cls.batch:
            raise ConfigError(f"{name_or_jobid} is a run of {found.record.batch}; {cls.__name__} is for {cls.batch}")
        cluster = cls.__new__(cls)
        wanted = Wanted(found.record.run.settings, None)
        run = BatchRun(cls.batch, wanted, cls.patience, attached=found, takes_over=shutdown_on_close)
        cluster._make(run, asynchronous=asynchronous)
        cluster._session.keeps_job = True
        cluster._begin()
        return cluster

    def _prepare(self, given: dict[str, Any]) -> BatchRun:
        wanted = wanted_settings.read(given, f"keyword {{name}} of {type(self).__name__}", self.batch, live=True)
        return BatchRun(self.batch, wanted, self.patience)

    # --- jobs that come and go

    @property
    def _supports_scaling(self) -> bool:  # type: ignore[override]
        return self.settings.shape == "elastic"

    @property
    def wanted_workers(self) -> int:
        """How many workers the cluster is to have."""
        return self._run.expected + (self._scaler.wanted_workers if self._scaler else 0)

    @property
    def _requested_workers(self) -> int:
        return self._run.expected + (self._scaler.requested_workers if self._scaler else 0)

    @property
    def jobs(self) -> Jobs:
        """The cluster's jobs and what each is doing, and the last few that are gone; it prints as a table."""
        run, end = self._run, self._state.end
        if run.job is None:
            return jobs_of([], (), is_over=False)
        first, members = run.now()
        head = head_row(first, self.settings.nodes, run.job.log, end)
        rows = [head, *(member_row(row.facts, row.recorded.log, end) for row in members)]
        return jobs_of(rows, run.fleet.gone if run.fleet else (), is_over=end is not None)

    def scale(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: int | str | None = None,
        cores: float | None = None,
    ) -> Any:  # noqa: ANN401 - a coroutine of an asynchronous cluster
        """Have ``n`` workers, or so many jobs beside the first one; what is missing has been submitted on return.

        Parameters
        ----------
        n : int, optional
            Workers, those of the first job included; rounded up to whole jobs.
        jobs : int, optional
            One-node jobs that come and go, in place of ``n``.
        memory, cores : number or str, optional
            As of dask-jobqueue: what all workers have together, in place of ``n``. A worker has ``cores_per_gpu``
            (or ``nthreads``) and ``memory_limit`` (or its part of ``memory``).

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or it is a number that cannot be.
        SubmitError
            The batch system refused, in its own words.

        """
        self._must_run()
        scaler = self._elastic()
        check_scale(n, jobs, cores, memory)
        if jobs is None:
            workers = workers_with(self.settings, cores, memory) if n is None else n
            jobs = scaler.jobs_for(workers - self._run.expected)
        return self.sync(scaler.scale, int(jobs))

    def adapt(self, *_: Any, **options: Any) -> Any:  # noqa: ANN401
        """Have as many workers as there is work for.

        Parameters
        ----------
        *_ : object
            Ignored; distributed's clusters take a class here.
        **options
            ``minimum``, ``maximum``: workers; or ``minimum_jobs``, ``maximum_jobs``: jobs that come and go; or
            ``minimum_cores``, ``minimum_memory`` and so on: see :meth:`scale`.
            ``interval``, ``wait_count``, ``target_duration`` as of distributed's Adaptive, but slower by default:
            a job that goes waits in the queue again.

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or more are asked for at least than at most.

        """
        self._must_run()
        options = bounds(self.settings, self._run.expected, self._elastic().expected, options)
        return super().adapt(Adaptive=JobAdaptive, **options)

    async def adapt_to(self, workers: int) -> None:
        """Want so many workers for now; called by :class:`JobAdaptive`."""
        scaler = self._elastic()
        await scaler.scale(scaler.jobs_for(workers - self._run.expected), adapting=True)

    def _elastic(self) -> Scaler:
        if self._scaler is None:
            raise ConfigError(
                f"this cluster is one job of fixed size (nodes={self.settings.nodes}): start it with shape='elastic' "
                "to scale it, or start another one with nodes=…"
            )
        return self._scaler

    @property
    def _given_up(self) -> HpcGpuError | None:
        trouble = self._run.loop.trouble if self._run.loop else ""
        given_up = self._scaler.given_up if self._scaler else None
        return super()._given_up or given_up or (JobError(trouble) if trouble else None)

    def _job_rows(self) -> tuple[JobRow, ...]:
        jobs = self.jobs
        return (*jobs.rows, *jobs.gone)

    def _views(self) -> list[JobView]:
        return [row.view for row in self.jobs.rows if row.has != "scheduler"]

    def _ready_line(self) -> str:
        if self._run.expected:
            return super()._ready_line()
        return "READY scheduler here; no workers yet: cluster.scale(n) or cluster.adapt() asks for them"

    # --- its life

    async def _connect(self) -> None:
        seen = self._run.seen = Seen(
            scheduler=lambda: self.scheduler_comm,
            workers=lambda: self.scheduler_info["workers"],
            searching=lambda: self._session.is_searching,
            changed=self._changed.set,
            say=self._log,
        )
        await super()._connect()
        if self._supports_scaling:
            self._scaler = Scaler(self._run.make_fleet(), seen)
            await self._scaler.started()

    async def _show_ready(self) -> None:
        if self._run.loop:
            self._run.loop.ready()
        await super()._show_ready()

    def _update_worker_status(self, op: str, msg: Any) -> None:  # noqa: ANN401
        super()._update_worker_status(op, msg)
        if self._run.loop:
            self._run.loop.alarm.ring()

    def _lost(self, why: str) -> None:
        self._stop()
        super()._lost(why)

    def _stop(self) -> None:
        """Look after the jobs no longer."""
        if self._scaler:
            self._scaler.stop()
        elif self._run.loop:
            self._run.loop.stop()

    async def _detach(self) -> None:
        if not isinstance(self._run.job, BatchJob):
            raise ConfigError("scheduler='here': the scheduler dies with this process, so it cannot be detached")
        await self._session.detach(self.job_id)
        if self.status == Status.starting and self._starting:
            self._starting.cancel()
        else:
            await self._close()

    def _closed_words(self) -> str:
        ended = self._run.head_facts.state is JobState.ENDED
        if not self._session.keeps_job or self._state.end or ended:
            return super()._closed_words()
        attach = f"{type(self).__name__}.attach({self.job_id!r})"
        return f"{'closed' if self._run.is_attached else 'detached'}: job {self.job_id} goes on, {attach} takes it up"

    async def _close(self) -> None:
        self._stop()
        await super()._close()

    async def _end_jobs(self) -> None:
        try:
            if self._scaler:
                await self._scaler.close()
        finally:
            await super()._end_jobs()


class SLURMGPUCluster(BatchGPUCluster):
    """A scheduler and one bound, spilling worker per GPU, in one Slurm job.

    With ``shape="elastic"`` more one-node jobs come and go: :meth:`scale`, :meth:`adapt`.

    Examples
    --------
    >>> from hpcgpu import SLURMGPUCluster
    >>> from distributed import Client
    >>> with SLURMGPUCluster(nodes=2, gpus_per_node=4, walltime="01:00:00") as cluster, Client(cluster) as client:
    ...     client.submit(sum, [1, 2]).result()
    3

    """

    batch = "slurm"


class PBSGPUCluster(BatchGPUCluster):
    """A scheduler and one bound, spilling worker per GPU, in one job of OpenPBS or PBS Professional.

    Takes the options of :class:`SLURMGPUCluster`.
    """

    batch = "pbs"
