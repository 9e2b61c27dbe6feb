"""The cluster object that people hold: distributed's interface to a run and a connection."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

from dask.utils import parse_timedelta
from distributed.core import Status
from distributed.security import Security
from distributed.utils import Log, Logs

from hpcgpu.config.entry_points import unused
from hpcgpu.config.keywords import documented, parameters
from hpcgpu.deploy import compat
from hpcgpu.deploy.cluster.batch_run import ClusterRun
from hpcgpu.deploy.cluster.connection import Connection
from hpcgpu.deploy.cluster.reported import ReportedCluster
from hpcgpu.deploy.jobs.fleet import SchedulerView
from hpcgpu.deploy.progress import SHORT_S, Progress
from hpcgpu.errors import ClosedError, ConfigError, JobError
from hpcgpu.model import Patience
from hpcgpu.plan.jobs.job_text import End
from hpcgpu.spill.store.messages import register
from hpcgpu.supervise import reason_of

_ABSENT_S = 2.0  # between two questions which workers did not start, while some are waited for
_SAVE_S, _ANSWER_S = 60.0, 2.0  # for workers to write what checkpoints lack, at close
_NO_WORKERS = "READY scheduler here; no workers yet: request them by cluster.scale(n) or cluster.adapt()"
# Attributes of distributed's LocalCluster that people expect.
_INSTEAD = {
    "jobs": ": a cluster of one machine has no jobs; clusters of a batch system have",
    "workers": ": cluster.scheduler_info['workers'] has the facts of each, cluster.bindings() where they are",
    "scheduler": ": it runs in another process; cluster.scheduler_address, cluster.scheduler_info",
    "worker_spec": ": cluster.explain() has the plan",
    "nannies": ": cluster.scheduler_info['workers'] has the address of each nanny",
}


class GPUCluster(ReportedCluster):
    """A scheduler on rank 0 and one bound, spilling worker per GPU, started as one job.

    Parameters
    ----------
    **keywords
        The options.
    asynchronous : bool
        True inside a running event loop: ``async with``, or ``await`` the object.
    loop : IOLoop, optional
        As of distributed's clusters.
    quiet : bool
        Print nothing while waiting.

    Raises
    ------
    ConfigError
        An option is wrong; nothing has been submitted.
    SubmitError
        The batch system refused the job, in its own words.
    JobError
        The job ended before its workers were there, with the tail of its log.

    """

    entry_point: ClassVar[str] = ""  # of config.entry_points: which options it refuses
    waits_in_queue: ClassVar[bool] = True  # so its progress is shown at once
    patience: ClassVar[Patience] = Patience()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give the class a signature and a docstring with all of its options, for help() and completion."""
        super().__init_subclass__(**kwargs)
        arguments = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        refused = unused(cls.entry_point)
        cls.__signature__ = inspect.Signature([*parameters(refused), *arguments])
        cls.__doc__ = documented(cls.__doc__ or "", GPUCluster.__doc__ or "", refused)

    def __init__(
        self, *positional: Any, asynchronous: bool = False, loop: Any = None, quiet: bool = False, **keywords: Any
    ) -> None:
        if positional:
            raise ConfigError(
                f"{type(self).__name__}({positional[0]!r}): give options by name, as gpus_per_node=2 or gpus='sim:2'"
            )
        self._begin(self._prepare(keywords), asynchronous=asynchronous, loop=loop, quiet=quiet)

    @abstractmethod
    def _prepare(self, keywords: dict[str, Any]) -> ClusterRun:
        """Make the run of these options, without a start."""

    def _begin(self, run: ClusterRun, *, asynchronous: bool, loop: Any = None, quiet: bool = False) -> None:
        """Start; an asynchronous object starts when it is awaited."""
        if asynchronous and loop is None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                raise ConfigError(
                    f"asynchronous=True outside of an event loop: leave it out, or write 'cluster = await "
                    f"{type(self).__name__}(asynchronous=True, ...)' in a coroutine"
                ) from None
        self.settings = run.settings
        register()  # a client of this process can scatter arrays of CuPy: distributed's own way needs numba
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=quiet, name=self.settings.job_name)
        self._watch_worker_status_comm: Any = None  # distributed's, for the scheduler's news of its workers
        self._changed = asyncio.Event()
        progress = Progress(self._cluster_manager_logs, quiet, 0.0 if self.waits_in_queue else SHORT_S)
        self._run, self._progress, self._supports_scaling = run, progress, run.scales
        changed = self._changed.set
        self._connection = Connection(
            run, progress, self.patience, reconnected=self._start_again, lost=self._lost, changed=changed
        )
        self._calls: set[asyncio.Future[Any]] = set()
        self._starting: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        if not self.asynchronous:
            self._loop_runner.start()
            try:
                self.sync(self._start)
            except BaseException:
                with contextlib.suppress(Exception):
                    self.sync(self._close)  # an interrupt has left it at work
                self._loop_runner.stop()
                raise

    @classmethod
    def attach(cls, name_or_jobid: str, *, take_over: bool = False, asynchronous: bool = False) -> Self:
        """Return the cluster of a run that another process has started: one that was detached, or not yet lost.

        Any process of yours may attach that sees the same home folder, to a local cluster any process on its machine.
        It waits for a job that is still pending. A run has one owner, the object that submitted it or took it over
        last, which alone may scale and end it. All others read: they connect clients, and show jobs, bindings and
        memory.

        Parameters
        ----------
        name_or_jobid : str
            As ``hpcgpu ps`` shows them; ``job_name``, ``job_id`` or ``local_directory`` of a local cluster.
        take_over : bool
            Become the run's owner, whether or not the one before is alive: this object may scale, and the jobs end with
            it unless it detaches. Else the jobs go on as they were when this object is closed. Not of a local cluster,
            which ends with the process that started it.
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
        cluster = cls.__new__(cls)
        cluster._begin(cls._find(str(name_or_jobid), take_over=take_over), asynchronous=asynchronous)
        return cluster

    @classmethod
    @abstractmethod
    def _find(cls, name: str, *, take_over: bool) -> ClusterRun:
        """Return an existing run for an object that takes it up."""

    @property
    def security(self) -> Security:
        """For connections to the scheduler: its certificate, and the key to it.

        Raises
        ------
        ConfigError
            The cluster has not been started; a client that is made of it now could never connect.
        JobError
            It is lost or closed.

        """
        if self._connection.is_searching and not self.asynchronous:  # a requeued job has another certificate
            self.sync(self._connection.search_ended)
        self._must_run()
        return self._connection.security

    @property
    def scheduler_address(self) -> str:
        """The scheduler's address, as distributed writes it."""
        return "<Not Connected>" if self._end else str(super().scheduler_address)

    @property
    def job_id(self) -> str:
        """The batch system's id of the job; empty before it is submitted."""
        return self._run.job.id if self._run.job else ""

    def job_script(self) -> str:
        """Return the submitted script, or the command; "" before the submission."""
        return self._run.script

    @property
    def wanted_workers(self) -> int:
        """The number of workers that the cluster is to have."""
        return self._run.wanted_workers

    @property
    def plan(self) -> set[str]:
        """As in distributed's clusters: the wanted workers; workers that have not registered yet have no real names."""
        return self._named(self.wanted_workers)

    @property
    def requested(self) -> set[str]:
        """As in distributed's clusters: the workers of :attr:`plan` whose jobs have been submitted."""
        return self._named(self._run.requested_workers)

    def _named(self, count: int) -> set[str]:
        """Return names for ``count`` workers; workers that have not registered yet have none of their own."""
        names = set(map(str, self.observed))
        return names | {f"not registered yet, {i}" for i in range(len(names), 0 if self._end else count)}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{_INSTEAD.get(name, '')}")

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if getattr(self, "status", None) == Status.created:
            text = f"{type(self).__name__} was never awaited, so it has not started; write: cluster = await ..."
            _warn(text, RuntimeWarning, source=self)
        else:
            super().__del__(_warn)

    def sync(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a coroutine function. In an asynchronous cluster it begins at once, whether or not it is awaited."""
        result = super().sync(func, *args, **options)
        if not inspect.iscoroutine(result):
            return result
        self._calls.add(call := asyncio.ensure_future(result))
        call.add_done_callback(self._calls.discard)
        return call

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:
        """Return the logs of the cluster, the scheduler and the workers; after the end, of the cluster only."""
        if self._end and not self.asynchronous:  # the thread of its event loop may have ended, too
            text = "\n".join(line for _, line in self._cluster_manager_logs)
            return Logs({"Cluster": Log(text)} if cluster else {})
        return super().get_logs(cluster, scheduler, workers)

    async def _get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:
        if self.status != Status.running:  # the cluster's own log remains
            scheduler = workers = False
        return await super()._get_logs(cluster, scheduler, workers)

    def wait_for_workers(self, n_workers: int, timeout: float | str | None = None) -> Any:
        """Wait until ``n_workers`` have registered, and show the state of their jobs meanwhile.

        Raises
        ------
        JobError, SubmitError
            They will not come; with the reason, and the end of the last job's log.
        TimeoutError
            They have not come within ``timeout`` seconds; with the state of their jobs.
        ConfigError
            More workers than a cluster of fixed size has.

        """
        self._must_run()
        if not self.waits_in_queue and n_workers > self.wanted_workers:
            raise ConfigError(
                f"wait_for_workers({n_workers}): this cluster always has {self.wanted_workers} workers; to have more, "
                "create another one"
            )
        return self.sync(self._wait_for_workers, n_workers, timeout)

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | str | None = None) -> None:
        progress, limit_s = self._progress, parse_timedelta(timeout)
        try:
            async with asyncio.timeout(limit_s):
                while len(self.scheduler_info["workers"]) < n_workers:
                    self._changed.clear()  # first: it may be set while the scheduler is asked
                    self._must_run()
                    why = self._connection.trouble
                    if error := JobError(why) if why else self._run.given_up:
                        raise error
                    await self._check_absent(n_workers)
                    progress.show(self._line(n_workers))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _ABSENT_S)
            await self._show_notes()
            progress.show(self._line(n_workers))
        except TimeoutError:
            raise TimeoutError(f"not {n_workers} workers within {limit_s:g} s: {self._line(n_workers)}") from None
        finally:
            progress.end()

    async def _show_ready(self) -> None:
        await self._run.ready(len(self.scheduler_info["workers"]) + (absent := len(await self._absent())))
        await self._show_notes()
        workers = len(self.scheduler_info["workers"])
        line = self._line(workers) if workers or not self._run.scales else _NO_WORKERS
        self._progress.show(f"{line}; {absent} did not start" if absent else line)
        self._progress.end()
        if limit := self._run.limit:
            self._log(limit)
        if self.dashboard_link and self._connection.browser and not self.quiet:
            self._progress.say(*self._connection.browser.lines)

    async def _show_notes(self) -> None:
        with contextlib.suppress(OSError):  # the connection has just broken, which _watch_worker_status reports
            notes = await self.scheduler_comm.hpcgpu_notes()
            self._progress.show_notes(notes, await self._absent(), quiet=self.quiet)

    def _log(self, log: str) -> None:
        """Print a line instead of distributed's clusters; warnings are printed by the progress, even if quiet."""
        if not self.quiet:
            self._progress.say(log)

    def __await__(self) -> Any:
        async def started() -> Self:
            if self.status == Status.created:
                await self._start()
            return self

        return started().__await__()

    async def _start(self) -> None:
        self.status = Status.starting
        self._starting = asyncio.current_task()
        try:
            await self._connect()
            await super()._start()
            await self._show_ready()
        except BaseException as e:
            await self._close()
            if isinstance(e, asyncio.CancelledError) and self._connection.keeps_job:
                raise JobError(f"job {self.job_id or '-'} was detached before its workers were there") from None
            raise

    async def _connect(self) -> None:
        """Start or take up the run, and connect to its scheduler."""
        run, connection = self._run, self._connection
        view = SchedulerView(
            scheduler=lambda: self.scheduler_comm,
            workers=lambda: self.scheduler_info["workers"],
            searching=lambda: connection.is_searching,
            changed=self._changed.set,
            say=self._log,
            end=lambda: self._end,
        )
        await run.start(await connection.begin(), view)
        self.scheduler_comm = await connection.connect()

    async def _start_again(self, scheduler: Any) -> None:
        """Repeat the start of distributed's cluster with another connection."""
        old, comm = self.scheduler_comm, self._watch_worker_status_comm
        self._watch_worker_status_comm = None  # its end is not reported
        if comm:
            await comm.close()
        if self._sync_cluster_info_task:
            self._sync_cluster_info_task.cancel()
        self.scheduler_comm = scheduler
        self._connection.hold(scheduler)
        await super()._start()
        await old.close_rpc()

    async def _watch_worker_status(self, comm: Any) -> None:
        reason = "the scheduler closed the connection"
        try:
            await super()._watch_worker_status(comm)
        except Exception as e:  # distributed has logged it; without news the list of workers would be out of date
            reason = f"a message of the scheduler about its workers could not be read: {reason_of(e)}"
            comm.abort()
        if self.status == Status.running and comm is self._watch_worker_status_comm:
            self._connection.lose(reason)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        if self._end:
            return
        if op == "stalled":
            self.scheduler_info["stalled"] = msg
            self._progress.say(msg or "tasks go on again")
        else:
            super()._update_worker_status(op, msg)
        self._changed.set()
        self._run.workers_changed()

    def _over(self, end: End, text: str) -> None:
        """Record that there is no scheduler, and so no worker, from now on."""
        self._end, self._end_text, self._connection.why_lost = end, text, ""
        info = self.scheduler_info  # distributed's SchedulerInfo, or a dict
        none = {name: 0 for name in ("n_workers", "total_threads", "total_memory") if name in info}
        self.scheduler_info = type(info)({**info, **none, "workers": {}})

    def _lost(self, why: str) -> None:
        """Report that the scheduler is gone for ever, and end all waiting for it."""
        self._run.stop()
        self._over(End.LOST, f"lost: {why}")
        self.status = Status.failed
        if self._adaptive:
            self._adaptive.stop()
        self._changed.set()
        compat.end_clients(self, f"the cluster is lost: {why}")
        self._progress.say(f"the cluster is lost: {why}")

    def detach(self) -> Any:
        """Leave the cluster running without this process; ``attach`` of its class takes it up again.

        It then runs until its time limit, ``hpcgpu stop``, or a client that shuts it down.

        Raises
        ------
        LaunchError
            The scheduler does not answer; nothing has changed.
        JobError
            Another object owns the run.

        """
        if self._run.job is None or self.status != Status.starting:
            self._must_run()
        return self._end_thread(self.sync(self._detach))

    async def _detach(self) -> None:
        await self._run.claim("detach")
        await self._connection.detach(self.job_id)
        if self.status == Status.starting and self._starting:
            self._starting.cancel()
        else:
            await self._close()

    def close(self, timeout: float | None = None) -> Any:
        """Close the cluster: its job ends, and so does the thread of its event loop."""
        return self._end_thread(super().close(timeout))

    def _end_thread(self, result: Any) -> Any:
        """End the thread of the event loop after a call that ended the cluster; return the call's result."""
        compat.end_thread(self, lambda: self._end is End.CLOSED)
        return result

    def shutdown(self) -> Any:
        """End the job, even if :meth:`close` would leave it running, unless another object owns it.

        Raises
        ------
        JobError
            This object has left the job already, or the object that owns it is alive; with the way to take it over.

        """
        if self._end is End.LEFT:
            raise ClosedError(f"this {type(self).__name__} is {self._state}")
        if self.status == Status.closed:
            return self.close()
        return self._end_thread(self.sync(self._shutdown))

    async def _shutdown(self) -> None:
        await self._run.claim("end")
        self._connection.keeps_job = False
        await self._close()

    async def _close(self) -> None:
        self._run.stop()
        if self.status != Status.closed:
            self._closing = self._closing or asyncio.create_task(self._close_once())
            await asyncio.shield(self._closing)  # several may wait for it, and some not for long

    async def _save(self) -> None:
        """Have the workers write what checkpoints lack; say what they could not."""
        try:
            async with asyncio.timeout(_SAVE_S + _ANSWER_S):
                texts = await self.scheduler_comm.hpcgpu_save(limit_s=_SAVE_S)
        except (OSError, TimeoutError) as e:
            texts = [f"checkpoints may lack finished chunks: {reason_of(e)}"]
        for text in texts:
            self._progress.say(text)

    async def _close_once(self) -> None:
        run, connection = self._run, self._connection
        self.status = Status.closing
        self._changed.set()  # ends all waiting for workers
        self._progress.end()
        if self._asking:
            self._asking.cancel()
        if not self._end and not connection.is_searching:
            if self.scheduler_comm:  # it has started
                await self._save()
            await self._ask_summary()
        connection.keeps_job |= not await run.is_mine()
        await connection.leave()
        await super()._close()
        self.status = Status.closing  # as long as the job exists
        try:
            await connection.close()
            end = f"closed; it was {self._end_text}" if self._end is End.LOST else "closed"
            left = await run.leave(type(self).__name__) if connection.keeps_job else ""
            self._over(End.LEFT, end if self._end else left or end)
            if not connection.keeps_job:
                with self._progress.waiting("closing: waiting for the end of the job" + "s" * run.scales):
                    are_gone = await run.end()
                if are_gone:
                    await connection.remove_folder()  # the guard needs it as long as a job may exist
                self._end = End.CLOSED
        finally:
            self.status = Status.closed  # nothing is left to do: an event loop may end with it
            self._show_end()
