"""The cluster classes: of batch systems, which translate arguments of ``scale`` and ``adapt``, and of this machine.

Together: these are the classes of user code, and differ in the run that they hold.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, ClassVar

from distributed.deploy.adaptive import Adaptive

from hpcgpu.config import layers
from hpcgpu.config.migration import read_local_cuda
from hpcgpu.deploy.cluster import security_loader
from hpcgpu.deploy.cluster.batch_run import BatchRun
from hpcgpu.deploy.cluster.cluster import GPUCluster
from hpcgpu.deploy.cluster.local_run import LocalRun, find
from hpcgpu.deploy.jobs import Run, home
from hpcgpu.deploy.jobs.runs import Jobs
from hpcgpu.deploy.settings import Wanted, read
from hpcgpu.errors import ConfigError, LaunchError, whole
from hpcgpu.model import Settings
from hpcgpu.model.allocation import Limits
from hpcgpu.model.job import Backoff
from hpcgpu.plan.jobs.needs import Size, shortages
from hpcgpu.plan.jobs.request import workers_per_node
from hpcgpu.supervise import FailureLog
from hpcgpu.units import counted, parse_bytes

security_loader.install()
# distributed adapts each second, and removes workers after three: a job that had queued for an hour would be lost.
INTERVAL = "5s"
WAIT_COUNT = 12

_ALLOWED = "give one of them, 0 or more: n workers, jobs, or cores and memory of all workers together"


def check_scale(n: object, jobs: object, cores: object, memory: object) -> None:
    """Raise ConfigError unless the size is given in exactly one way, with a possible number."""
    ways = [w for w in (n, jobs, memory if cores is None else cores) if w is not None]
    counts = [w for w in (n, jobs) if w is not None]
    if len(ways) != 1 or any(not isinstance(c, Integral) or isinstance(c, bool) or c < 0 for c in counts):
        arguments = {"n": n, "jobs": jobs, "cores": cores, "memory": memory}
        text = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        raise ConfigError(f"scale({text}); {_ALLOWED}")


def workers_with(settings: Settings, cores: object, memory: object, *, most: bool = False) -> int:
    """Return how many workers have these cores and this memory together, as in dask-jobqueue; ``most``: at most.

    ConfigError for a value that is no number, or if a worker's memory or cores are unknown.
    """
    count = 0.0 if cores is None else _number(cores)
    if not 0 <= count < math.inf:
        raise ConfigError(f"cores={cores!r} is no number of cores; allowed: 0 or more, for all workers together")
    size = 0 if memory is None else parse_bytes(memory)
    counts = []
    if count:
        if not settings.cores_per_gpu and settings.where("nthreads") == "default":
            raise ConfigError(
                "cores= of all workers: the number of cores of a worker is unknown; create the cluster with "
                "cores_per_gpu=, or give the number of workers, scale(n), or of jobs, scale(jobs=n)"
            )
        each = settings.cores_per_gpu / settings.workers_per_gpu if settings.cores_per_gpu else settings.nthreads
        counts.append(count / each)
    if size:
        of_each = settings.memory_limit.nbytes
        if not of_each and not settings.memory_bytes:
            raise ConfigError(
                "memory= of all workers: the memory of a worker is unknown; create the cluster with memory= (of each "
                "node) or memory_limit= (of each worker), or give the number of workers, scale(n), or of jobs, "
                "scale(jobs=n)"
            )
        counts.append(size / (of_each or (settings.memory_bytes or 0) / workers_per_node(settings)))
    return math.floor(min(counts, default=0)) if most else math.ceil(max(counts, default=0))


def bounds(settings: Settings, first: int, per_job: int, options: dict[str, object]) -> dict[str, object]:
    """Translate the options of ``adapt``: bounds in jobs, cores and memory become bounds in workers.

    ``first`` and ``per_job``: workers of the job with the scheduler, and of each other one. Raises ConfigError for a
    bound that is no number, a bound that is given in two ways, or a minimum above the maximum.
    """
    rest = {name: value for name, value in options.items() if value is not None}
    for name, most in (("minimum", False), ("maximum", True)):
        jobs, cores, memory = (rest.pop(f"{name}_{of}", None) for of in ("jobs", "cores", "memory"))
        if sum(way is not None for way in (rest.get(name), jobs, memory if cores is None else cores)) > 1:
            raise ConfigError(f"adapt: {name} is given in two ways; {_ALLOWED}")
        if jobs is not None:
            if not isinstance(jobs, Integral):
                raise ConfigError(f"adapt: {name}_jobs={jobs!r} is no number of jobs; allowed: a whole number from 0")
            rest[name] = first + int(jobs) * per_job
        elif cores is not None or memory is not None:
            rest[name] = workers_with(settings, cores, memory, most=most)
    low, high = rest.get("minimum", 0), rest.get("maximum", math.inf)
    if not 0 <= _number(low) <= _number(high):
        raise ConfigError(f"adapt: minimum {low}, maximum {high}; give 0 or more, and a maximum that is not below it")
    return rest


def _number(value: object) -> float:
    """Return a number; NaN, which no bound allows, for other objects."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


class JobAdaptive(Adaptive):
    """Keeps as many workers as the scheduler has work for, between ``minimum`` and ``maximum``.

    It adds workers at once, and removes some only after the scheduler has needed fewer ``wait_count`` times in a row.
    plan.jobs.request.reconcile decides which jobs end, and keeps young pending ones.
    """

    def __init__(self, cluster: Any, interval: str = INTERVAL, wait_count: int = WAIT_COUNT, **kwargs: Any) -> None:
        super().__init__(cluster, interval=interval, wait_count=wait_count, **kwargs)
        self._fewer = 0
        every_s = self.interval or 0.0
        self._failures = FailureLog("the count of workers that have work", Backoff(every_s, every_s))

    async def adapt(self) -> None:
        """Adapt once; distributed calls this at intervals, and would log each error."""
        try:
            target, before = await self.safe_target(), self.cluster.wanted_workers
            self._fewer = self._fewer + 1 if target < before else 0
            if target > before or self._fewer >= self.wait_count:
                self._fewer = 0
                await self.cluster.adapt_to(target)
        except Exception as e:
            self._failures.failed(e)
        else:
            self._failures.went_well()


class BatchGPUCluster(GPUCluster):
    """A cluster of one job of a batch system, to which one-node jobs come and go where ``shape="elastic"``."""

    batch: ClassVar[str]
    _run: BatchRun

    @classmethod
    def _find(cls, name: str, *, take_over: bool) -> BatchRun:
        existing = Run.find(home(), name)
        if existing.record.batch != cls.batch:
            raise ConfigError(f"{name} is a run of {existing.record.batch}; {cls.__name__} is for {cls.batch}")
        if not existing.head:
            raise LaunchError(
                f"run {existing.name} in {existing.folder} has no job with a scheduler: it has not been "
                "submitted yet, or the scheduler is beside the process that made it (scheduler='here')"
            )
        user = Wanted(existing.document.settings, None, cls.batch)
        return BatchRun(user, cls.patience, existing, takes_over=take_over)

    def _prepare(self, keywords: dict[str, Any]) -> BatchRun:
        user = read(keywords, f"keyword {{name}} of {type(self).__name__}", self.batch, live=True)
        return BatchRun(user, self.patience)

    @property
    def jobs(self) -> Jobs:
        """The cluster's jobs with the state of each, and the last few that are gone; it prints as a table."""
        return self._run.jobs

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
        run = self._elastic()
        check_scale(n, jobs, cores, memory)
        if jobs is None:
            jobs = run.members_for(workers_with(self.settings, cores, memory) if n is None else n)
        self._check_limit(f"scale(): {counted(int(jobs), 'job')}", int(jobs))
        return self.sync(run.fleet.scale, int(jobs))

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
        JobError
            Another object owns the run.

        """
        run = self._elastic()
        options = bounds(self.settings, run.first_workers, run.member_workers, options)
        if math.isfinite(most := _number(options.get("maximum", math.inf))):
            self._check_limit(f"adapt: maximum {most:g}", run.members_for(int(most)))
        return super().adapt(Adaptive=JobAdaptive, **options)

    async def adapt_to(self, workers: int) -> None:
        """Set the number of workers for now; called by :class:`JobAdaptive`."""
        await self._run.fleet.scale(self._run.members_for(workers), adapting=True)

    def _check_limit(self, asked_for: str, jobs: int) -> None:
        """Raise ConfigError if the scheduler could not have the workers of so many jobs beside the first."""
        run, place = self._run, self._connection.scheduler_file
        size = Size(run.first_workers + jobs * run.member_workers, self.settings.nodes + jobs, run.member_workers)
        if place and (short := shortages(size, Limits(files=place.files), exact=True)):
            raise ConfigError(f"{asked_for}: {short[0]} where the scheduler is, on {place.node}; give a smaller number")

    def _elastic(self) -> BatchRun:
        """Return the run; raise ConfigError for a fixed size, JobError if it has ended or another object owns it."""
        self._must_run()
        if not self._run.scales:
            raise ConfigError(
                f"this cluster is one job of fixed size (nodes={self.settings.nodes}): start it with "
                "shape='elastic' to scale it, or start another one with nodes=…"
            )
        self._run.must_own("scale")
        return self._run


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


class LocalGPUCluster(GPUCluster):
    """One bound, spilling worker per GPU of this machine, or per simulated GPU (``gpus="sim:4"``).

    Takes every keyword of dask-cuda's LocalCUDACluster, or names what to use in its place.

    Examples
    --------
    >>> from hpcgpu import LocalGPUCluster
    >>> from distributed import Client
    >>> with LocalGPUCluster(gpus="sim:2") as cluster, Client(cluster) as client:
    ...     client.submit(sum, [1, 2]).result()
    3

    """

    entry_point = layers.LOCAL
    waits_in_queue = False

    @classmethod
    def _find(cls, name: str, *, take_over: bool) -> LocalRun:
        if take_over:
            raise ConfigError("take_over=True: a local cluster ends with the process that started it; leave it out")
        existing = find(name)
        return LocalRun(existing.document.settings, {}, attached=existing)

    def _prepare(self, keywords: dict[str, Any]) -> LocalRun:
        ours, environ = read_local_cuda(keywords)
        try:
            user = read(ours, f"keyword {{name}} of {type(self).__name__}", entry_point=self.entry_point)
            return LocalRun(user.settings, environ)
        except ConfigError as e:
            names = ("n_workers", "gpus" if "gpus" not in ours else "gpus_per_node", "CUDA_VISIBLE_DEVICES")
            typed = next((name for name in names if keywords.get(name) is not None), "gpus_per_node")

            def form(part: str) -> str:
                is_named = part.startswith(("gpus_per_node", "keyword gpus_per_node "))
                return part.replace("gpus_per_node", typed, 1) if is_named else part

            if (text := whole(e, form)) == str(e):
                raise
            raise ConfigError(text) from None

    def scale(self, n: int | None = None, jobs: int | None = None) -> Any:
        """Refuse: there are no more GPUs."""
        raise ConfigError(
            "a local cluster cannot be scaled: it has only the GPUs of this machine. Start another one with gpus= or "
            "gpus_per_node=; clusters of a batch system grow and shrink (shape='elastic')"
        )

    def adapt(self, *_: Any, **__: Any) -> Any:
        """Refuse: see :meth:`scale`."""
        self.scale()
