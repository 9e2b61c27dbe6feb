"""The cluster classes of the batch systems."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from hpcgpu.deploy.cluster.cluster import GPUCluster, object_of
from hpcgpu.deploy.cluster.run import ClusterRun
from hpcgpu.deploy.cluster.scaler import JobAdaptive, bounds, check_scale, workers_with
from hpcgpu.deploy.jobs.rows import Jobs
from hpcgpu.deploy.jobs.run import Run, home
from hpcgpu.deploy.settings import Wanted, read
from hpcgpu.errors import ConfigError, LaunchError


class BatchGPUCluster(GPUCluster):
    """A cluster of one job of a batch system, to which one-node jobs come and go where ``shape="elastic"``."""

    batch: ClassVar[str]

    @classmethod
    def attach(
        cls,
        name_or_jobid: str,
        *,
        take_over: bool = False,
        shutdown_on_close: bool = False,
        asynchronous: bool = False,
    ) -> Self:
        """Return the cluster of a run that another process has submitted: one that was detached, or not yet lost.

        Any process of yours may attach that sees the same home folder. It waits for a job that is still pending.
        A run has one owner, the object that submitted it or took it over last, which alone may scale and end it. All
        others read: they connect clients, and show jobs, bindings and memory.

        Parameters
        ----------
        name_or_jobid : str
            As ``hpcgpu ps`` shows them.
        take_over : bool
            Become the run's owner, whether or not the one before is alive: this object may scale, and the jobs end with
            it unless it detaches. Else the jobs go on as they were when this object is closed.
        shutdown_on_close : bool
            The same as ``take_over``.
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
        existing = Run.find(home(), str(name_or_jobid))
        if existing.record.batch != cls.batch:
            raise ConfigError(f"{name_or_jobid} is a run of {existing.record.batch}; {cls.__name__} is for {cls.batch}")
        if not existing.head:
            raise LaunchError(
                f"run {existing.name} in {existing.folder} has no job with a scheduler: it has not been "
                "submitted yet, or the scheduler is beside the process that made it (scheduler='here')"
            )
        user = Wanted(existing.document.settings, None, cls.batch)
        run = ClusterRun(user, cls.patience, attached=existing, takes_over=take_over or shutdown_on_close)
        return object_of(cls, run, keeps_job=True, asynchronous=asynchronous)

    def _prepare(self, keywords: dict[str, Any]) -> ClusterRun:
        user = read(keywords, f"keyword {{name}} of {type(self).__name__}", self.batch, live=True)
        return ClusterRun(user, self.patience)

    @property
    def jobs(self) -> Jobs:
        """The cluster's jobs with the state of each, and the last few that are gone; it prints as a table."""
        return self.parts.run.jobs

    def scale(
        self, n: int | None = None, jobs: int | None = None, memory: int | str | None = None, cores: float | None = None
    ) -> Any:  # a coroutine of an asynchronous cluster
        """Scale to ``n`` workers, or ``jobs`` jobs beside the first one; return when missing jobs have been submitted.

        Parameters
        ----------
        n : int, optional
            Workers, including those of the first job; rounded up to whole jobs.
        jobs : int, optional
            One-node jobs that come and go, in place of ``n``.
        memory, cores : number or str, optional
            As in dask-jobqueue: the cores and memory of all workers together, in place of ``n``. A worker has
            ``cores_per_gpu`` (or ``nthreads``) and ``memory_limit`` (or its part of ``memory``).

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or the number is impossible.
        JobError
            Another object owns the run; with its owner, and the way to take it over.
        SubmitError
            The batch system refused, in its own words.

        """
        self.parts.must_run()
        run = self.parts.run
        run.check_elastic()
        check_scale(n, jobs, cores, memory)
        if jobs is None:
            jobs = run.members_for(workers_with(self.settings, cores, memory) if n is None else n)
        return self.sync(run.scale, int(jobs))

    def adapt(self, *_: Any, **options: Any) -> Any:
        """Adapt the number of workers to the work.

        Parameters
        ----------
        *_ : object
            Ignored; distributed's clusters accept a class here.
        **options
            ``minimum``, ``maximum``: workers; or ``minimum_jobs``, ``maximum_jobs``: jobs that come and go; or
            ``minimum_cores``, ``minimum_memory`` and so on: see :meth:`scale`.
            ``interval``, ``wait_count``, ``target_duration`` as in distributed's Adaptive, but slower by default:
            a replaced job waits in the queue again.

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or the minimum is above the maximum.

        """
        self.parts.must_run()
        run = self.parts.run
        run.check_elastic()
        options = bounds(self.settings, run.first_workers, run.member_workers, options)
        return super().adapt(Adaptive=JobAdaptive, **options)

    async def adapt_to(self, workers: int) -> None:
        """Set the number of workers for now; called by :class:`JobAdaptive`."""
        run = self.parts.run
        await run.scale(run.members_for(workers), adapting=True)


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
