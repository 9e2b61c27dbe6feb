"""The cluster classes: of batch systems, which translate arguments of ``scale`` and ``adapt``, and of this machine.

Together: these are the classes of user code, and differ in the run that they hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar

from distributed.deploy.adaptive import Adaptive

from hpcgpu.config import entry_points
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
from hpcgpu.model.settings import GROUPS
from hpcgpu.model.waits import Backoff
from hpcgpu.plan.jobs.needs import Size, shortages
from hpcgpu.plan.jobs.request import workers_per_node
from hpcgpu.report.table import Explanation
from hpcgpu.supervise import FailureLog
from hpcgpu.units import counted, parse_bytes

security_loader.install()
# distributed adapts each second, and removes workers after three: a job that had queued for an hour would be lost.
INTERVAL = "5s"
WAIT_COUNT = 12

_POOL = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
# Options of a cluster that its pools do not take over: what a job has, and where it runs.
_OF_SIZE = {*GROUPS["Size"], "cores_per_gpu", "memory", "memory_limit", "cores", "reserved_cores", "ranks"} - {"site"}
_OF_SIZE |= {"job_extra_directives", "job_directives_skip", "threads_per_worker", "queue", "partition", "resources"}
# Those that one scheduler and its workers have in common.
_OF_ALL = {*("job_name", "name", "site", "protocol", "security"), *GROUPS["Life"], *GROUPS["Network"]} - {"drain"}

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
    plan.jobs.reconcile decides which jobs end, and keeps young pending ones.
    """

    def __init__(
        self, cluster: Any, interval: str = INTERVAL, wait_count: int = WAIT_COUNT, pool: str = "", **kwargs: Any
    ) -> None:
        super().__init__(cluster, interval=interval, wait_count=wait_count, **kwargs)
        self._fewer, self._pool = 0, pool
        every_s = self.interval or 0.0
        self._failures = FailureLog("the count of workers that have work", Backoff(every_s, every_s))

    async def target(self) -> int:
        """Ask the scheduler for the number of workers; where there are pools, for the tasks of this one."""
        if not (pools := list(self.cluster.pools)):
            return int(await super().target())
        facts = {"nthreads": self.cluster.threads_of(self._pool), "target_duration": self.target_duration}
        return int(await self.scheduler.hpcgpu_demand(pool=self._pool, pools=pools, **facts))

    async def adapt(self) -> None:
        """Adapt once; distributed calls this at intervals, and would log each error."""
        try:
            target, before = await self.safe_target(), self.cluster.workers_of(self._pool)
            self._fewer = self._fewer + 1 if target < before else 0
            if target > before or self._fewer >= self.wait_count:
                self._fewer = 0
                await self.cluster.adapt_to(target, self._pool)
        except Exception as e:
            self._failures.failed(e)
        else:
            self._failures.went_well()


class Pool:
    """Jobs of another kind that come and go beside those of a cluster; its ``add_pool`` returns it."""

    def __init__(self, cluster: BatchGPUCluster, name: str) -> None:
        self.name, self._cluster = name, cluster
        self._adaptive: JobAdaptive | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, {counted(len(self.jobs), 'job')} of {self._cluster.name})"

    @property
    def jobs(self) -> Jobs:
        """The jobs of this pool."""
        every = self._cluster.jobs
        return Jobs(*(tuple(job for job in jobs if job.pool == self.name) for jobs in (every.rows, every.gone)))

    def explain(self) -> Explanation:
        """Return the plan of its jobs, with where each part was set."""
        return Explanation(self._cluster._run.explain(self.name))  # noqa: SLF001 - one module

    def scale(
        self, n: int | None = None, jobs: int | None = None, memory: int | str | None = None, cores: float | None = None
    ) -> Any:  # a coroutine of an asynchronous cluster
        """Scale to ``n`` workers of this pool, or to ``jobs`` jobs; as ``scale`` of the cluster."""
        return self._cluster._scale(self.name, n, jobs, memory, cores)  # noqa: SLF001

    def adapt(self, **options: Any) -> JobAdaptive:
        """Adapt the number of its workers to the tasks that name it as a resource; as ``adapt`` of the cluster."""
        options = self._cluster._bounds(self.name, options)  # noqa: SLF001
        if self._adaptive:
            self._adaptive.stop()
        self._adaptive = JobAdaptive(self._cluster, pool=self.name, **options)
        return self._adaptive


class BatchGPUCluster(GPUCluster):
    """A cluster of one job of a batch system, to which one-node jobs come and go where ``shape="elastic"``."""

    batch: ClassVar[str]
    _run: BatchRun
    _keywords: Mapping[str, Any] | None = None  # of this object; None: another one has started the cluster
    _pools: Mapping[str, Pool] = MappingProxyType({})

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
        self._keywords = keywords
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
        return self._scale("", n, jobs, memory, cores)

    def _scale(self, pool: str, n: int | None, jobs: int | None, memory: int | str | None, cores: float | None) -> Any:
        run = self._elastic()
        check_scale(n, jobs, cores, memory)
        if jobs is None:
            workers = workers_with(run.settings_of(pool), cores, memory) if n is None else n
            jobs = run.members_for(workers, pool)
        self._check_limit(f"scale(): {counted(int(jobs), 'job')}", int(jobs), pool)
        return self.sync(run.fleet.scale, int(jobs), pool=pool)

    def add_pool(self, name: str, nodes: int = 0, **options: Any) -> Any:  # a coroutine of an asynchronous cluster
        """Add jobs of another kind to an elastic cluster: of another queue, with other GPUs, or with none.

        Its workers have the resource ``name``, as many as they have threads: ``client.submit(f, resources={name: 1})``
        runs on this pool only. Tasks without resources run on any worker.

        Parameters
        ----------
        name : str
            Of the pool, and of the resource: letters, digits, ``_`` and ``-``.
        nodes : int
            One-node jobs to begin with.
        **options
            Of its jobs, such as ``queue``, ``cpu_workers``, ``gpus_per_node``, ``walltime``, ``memory``. With
            ``cpu_workers`` alone they have no GPU. The cluster's own are valid for all others that are not about size.

        Returns
        -------
        Pool
            With ``scale``, ``adapt``, ``jobs`` and ``explain``; ``pools`` of the cluster has it, too. An awaitable of
            it where the cluster is asynchronous.

        Raises
        ------
        ConfigError
            The name is taken, an option is wrong or is one of the whole cluster, or the cluster has a fixed size.
        JobError
            Another object owns the run.
        SubmitError
            The batch system refused the first jobs; the pool is there without them.

        """
        run = self._elastic()
        user = self._read_pool(name, options)
        check_scale(None, nodes, None, None)
        if nodes:
            self._check_limit(f"add_pool(): {counted(nodes, 'job')}", nodes, name, workers_per_node(user.settings))
        return self.sync(self._add_pool, run, name, user, nodes)

    async def _add_pool(self, run: BatchRun, name: str, user: Wanted, nodes: int) -> Pool:
        await run.add_pool(name, user)
        if nodes:
            await run.fleet.scale(nodes, pool=name)
        return self.pools[name]

    def _read_pool(self, name: str, options: dict[str, Any]) -> Wanted:
        """Read a pool's settings; ConfigError for a name or an option that it cannot have."""
        taken = {"GPU", "CPU", *self.settings.resources, *self._run.pools}
        if not isinstance(name, str) or not _POOL.fullmatch(name) or name in taken:
            raise ConfigError(
                f"add_pool({name!r}): allowed: a name of letters, digits, _ and -, which is no resource or pool of "
                f"this cluster ({', '.join(sorted(taken))})"
            )
        if self._keywords is None:
            raise ConfigError("add_pool: this object has not started the cluster, so it does not know its options")
        if wrong := [option for option in options if option in _OF_ALL]:
            raise ConfigError(f"add_pool: {', '.join(wrong)} of the whole cluster: give it where the cluster is made")
        inherited = {option: value for option, value in self._keywords.items() if option not in _OF_SIZE}
        if "cpu_workers" in options and not options.keys() & {"gpus_per_node", "gpus", "simulate"}:
            options = {"gpus_per_node": 0, **options}
        user = read({**inherited, **options}, "keyword {name} of add_pool", self.batch, live=True)
        resources = {**user.settings.resources, name: float(user.settings.nthreads)}
        of_cluster = {n: where for n, where in self.settings.sources.items() if n in inherited and n not in options}
        sources = {**user.settings.sources, **of_cluster}
        return replace(user, settings=replace(user.settings, resources=resources, sources=sources))

    @property
    def pools(self) -> Mapping[str, Pool]:
        """The pools by name, also those that another object has added."""
        self._pools = {name: self._pools.get(name) or Pool(self, name) for name in self._run.pools}
        return self._pools

    def threads_of(self, pool: str) -> int:
        """Return the number of threads of each worker of a pool; called by :class:`JobAdaptive`, as the next."""
        return self._run.settings_of(pool).nthreads

    def workers_of(self, pool: str) -> int:
        """Return the number of workers that a pool is to have; "": the cluster without its pools."""
        return self._run.workers_of(pool)

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
        return super().adapt(Adaptive=JobAdaptive, **self._bounds("", options))

    def _bounds(self, pool: str, options: dict[str, Any]) -> dict[str, Any]:
        """Translate the options of ``adapt``; ConfigError for impossible ones."""
        run = self._elastic()
        first = 0 if pool else run.first_workers
        options = bounds(run.settings_of(pool), first, run.per_job(pool), options)
        if math.isfinite(most := _number(options.get("maximum", math.inf))):
            self._check_limit(f"adapt: maximum {most:g}", run.members_for(int(most), pool), pool)
        return options

    async def adapt_to(self, workers: int, pool: str = "") -> None:
        """Set the number of workers of a pool for now; called by :class:`JobAdaptive`."""
        await self._run.fleet.scale(self._run.members_for(workers, pool), adapting=True, pool=pool)

    def _check_limit(self, asked_for: str, jobs: int, pool: str, per_job: int = 0) -> None:
        """Raise ConfigError if the scheduler could not have the workers of so many jobs of a pool beside all others."""
        run, place = self._run, self._connection.scheduler_file
        per_job = per_job or run.per_job(pool)
        others = [other for other in ("", *run.pools) if other != pool]
        workers = sum(map(run.workers_of, others)) + jobs * per_job + (0 if pool else run.first_workers)
        nodes = self.settings.nodes + jobs + sum(map(run.jobs_of, others))
        size = Size(workers, nodes, per_job)
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

    entry_point = entry_points.LOCAL
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
