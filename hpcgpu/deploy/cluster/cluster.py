"""The cluster object that people hold: distributed's interface to a session, a run and, where it scales, a scaler.

More than 300 lines, since it is all of that interface and little else: what it does is done by its parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from dask.utils import parse_timedelta
from distributed import Client
from distributed.core import Status
from distributed.security import Security
from distributed.utils import Log, Logs

from hpcgpu.config import entry_points, numpydoc
from hpcgpu.deploy import compat, report
from hpcgpu.deploy.cluster.notebook import NotebookCluster
from hpcgpu.deploy.cluster.progress import SHORT_S, Progress
from hpcgpu.deploy.cluster.session import Hooks, Run, Session
from hpcgpu.deploy.cluster.state import State, first_line, without_workers
from hpcgpu.deploy.cluster.summarised import SummarisedCluster
from hpcgpu.errors import HpcGpuError, JobError
from hpcgpu.model import Patience
from hpcgpu.plan.jobs.phase import End, JobView, summary_line
from hpcgpu.plan.jobs.worker_names import by_number
from hpcgpu.plan.views.notebook import ClusterView, Explanation
from hpcgpu.spill.store.dask import register
from hpcgpu.supervise.rounds import reason_of


class GPUCluster(NotebookCluster, SummarisedCluster):
    """A scheduler on rank 0 and one bound, spilling worker per GPU, started as one job.

    Parameters
    ----------
    **given
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

    scheduler_info: Any  # distributed's
    entry_point: ClassVar[str] = ""  # of config.entry_points: which options it refuses
    waits_in_queue: ClassVar[bool] = True  # people want to see for what, from the first moment
    patience: ClassVar[Patience] = Patience()
    _supports_scaling = False

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Give the class a signature and a docstring with every option that it takes, for help() and completion."""
        super().__init_subclass__(**kwargs)
        own = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        refused = entry_points.unused(cls.entry_point)
        cls.__signature__ = inspect.Signature([*numpydoc.parameters(refused), *own])
        cls.__doc__ = numpydoc.documented(cls.__doc__ or "", GPUCluster.__doc__ or "", refused)

    def __init__(self, *, asynchronous: bool = False, loop: Any = None, quiet: bool = False, **given: Any) -> None:  # noqa: ANN401
        self._make(self._prepare(given), asynchronous=asynchronous, loop=loop, quiet=quiet)
        self._begin()

    @abstractmethod
    def _prepare(self, given: dict[str, Any]) -> Run:
        """Return what the options ask for; nothing has been started."""

    def _make(self, run: Run, *, asynchronous: bool, loop: Any = None, quiet: bool = False) -> None:  # noqa: ANN401
        self._state = State(type(self).__name__)
        self._state.check_loop(asynchronous=asynchronous, loop=loop)
        self._run, self.settings = run, run.wanted.settings
        register()  # a client of this process can scatter arrays of CuPy: distributed's own way needs numba
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=quiet, name=self.settings.job_name)
        self._watch_worker_status_comm: Any = None  # distributed's: where the scheduler tells of its workers
        self._progress = Progress(self._cluster_manager_logs, quiet, 0.0 if self.waits_in_queue else SHORT_S)
        self._changed = asyncio.Event()
        hooks = Hooks(found=self._start_again, lost=self._lost, changed=self._changed.set)
        self._session = Session(self.settings, self._state, self._progress, self.patience, hooks)
        self._first_workers = 0  # those that were there when it was ready
        self._calls: set[asyncio.Future[Any]] = set()
        self._starting: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None

    def _begin(self) -> None:
        """Start; an asynchronous object starts when it is awaited."""
        if not self.asynchronous:
            self._loop_runner.start()
            try:
                self.sync(self._start)
            except BaseException:
                self._loop_runner.stop()
                raise

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
        self._must_run()
        return self._session.security

    @property
    def scheduler_address(self) -> str:
        """Where the scheduler is, as distributed writes it."""
        return "<Not Connected>" if self._state.end else str(super().scheduler_address)

    @property
    def job_id(self) -> str:
        """The batch system's id of the job; empty before it is submitted."""
        return self._run.job.id if self._run.job else ""

    def job_script(self) -> str:
        """Return what was submitted."""
        return self._run.job.script if self._run.job else ""

    @property
    def wanted_workers(self) -> int:
        """How many workers the cluster is to have."""
        return self._first_workers

    @property
    def _requested_workers(self) -> int:
        return self.wanted_workers

    @property
    def plan(self) -> set[str]:
        """As of distributed's clusters: the workers that are wanted; those that are not there yet have no names."""
        return self._state.named(self.observed, self.wanted_workers)

    @property
    def requested(self) -> set[str]:
        """As of distributed's clusters: of :attr:`plan`, those whose jobs have been submitted."""
        return self._state.named(self.observed, self._requested_workers)

    def __repr__(self) -> str:
        if state := self._state_text:
            return f"{self._cluster_class_name}({self.name}, {first_line(state)})"
        names = [str(w["name"]) for w in self.scheduler_info["workers"].values()]
        gpus = sum(not by_number(n)[1] for n in names) // self.settings.workers_per_gpu  # without one: "cpu0"
        return f"{str(super().__repr__()).removesuffix(')')}, gpus={gpus})"

    def _view(self) -> ClusterView:
        state = first_line(self._state_text or self.status.name)
        wanted = 0 if self._state.end else self.wanted_workers
        return ClusterView(state=state, link=self.dashboard_link, wanted=wanted)

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if getattr(self, "status", None) == Status.created:
            what = f"{type(self).__name__} was never awaited: nothing has been started; cluster = await ..."
            _warn(what, RuntimeWarning, source=self)
        else:
            super().__del__(_warn)

    @property
    def _state_text(self) -> str:
        return self._state.text(self.status, self._stalled)

    @property
    def _stalled(self) -> str:
        return self._state.stalled(self.status, self.scheduler_info.get("stalled", ""))

    def _must_run(self) -> None:
        """Raise unless the scheduler is there, or looked for."""
        self._state.must_run(self.status, self._stalled)

    def explain(self) -> Explanation:
        """Return the plan of the job, with where each part was set."""
        text = self._run.explain()
        if (state := self._state_text) and not self._stalled:
            return Explanation(f"{text}\nthis cluster is {state}\n")
        if facts := self._session.scheduler_file:
            text += f"\nscheduler of job {self.job_id or '-'} on {facts.node}\n"
            text += f"dashboard: {'cluster.dashboard_link' if self.dashboard_link else 'none'}\n"
        return Explanation(text)

    @property
    def dashboard_link(self) -> str:
        """The dashboard's address for your browser; this process leads it to the scheduler's node. It holds a secret.

        Empty where the cluster has none (``dashboard=False``), or has ended.
        """
        browser = self._session.browser
        return browser.url if browser and not self._state.end else ""

    def bindings(self) -> Any:  # noqa: ANN401 - a coroutine of an asynchronous cluster
        """Return what each worker is tied to, planned and actual: read back from the kernel, for all threads.

        Returns
        -------
        hpcgpu.deploy.report.Bindings
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(self._ask, report.bindings)

    def memory(self) -> Any:  # noqa: ANN401
        """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

        Returns
        -------
        hpcgpu.deploy.report.Memory
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(self._ask, report.memory)

    def trim_memory(self) -> Any:  # noqa: ANN401
        """Have all workers give free memory back to the kernel; see :func:`hpcgpu.trim_memory`.

        Returns
        -------
        dict of str to int
            Bytes given back, by worker; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(self._trim)

    async def _trim(self) -> Any:  # noqa: ANN401
        with self._progress.waiting("the workers give free memory back"):
            return await self._ask(report.trim_memory)

    async def _ask(self, question: Callable[[Client], Any]) -> Any:  # noqa: ANN401
        async with Client(self, asynchronous=True, set_as_default=False) as client:
            try:
                return await question(client)
            finally:
                compat.release_loop(client)

    def sync(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call a coroutine function. In an asynchronous cluster it begins at once, whether or not it is awaited."""
        result = super().sync(func, *args, **options)
        if not inspect.iscoroutine(result):
            return result
        self._calls.add(call := asyncio.ensure_future(result))
        call.add_done_callback(self._calls.discard)
        return call

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:  # noqa: ANN401
        """Return what was said by the cluster, the scheduler and the workers; of one that has ended, by the cluster."""
        if self._state.end and not self.asynchronous:  # the thread of its event loop may have ended, too
            said = "\n".join(line for _, line in self._cluster_manager_logs)
            return Logs({"Cluster": Log(said)} if cluster else {})
        return super().get_logs(cluster, scheduler, workers)

    async def _get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:  # noqa: ANN401
        if self.status != Status.running:  # what was said here is there all the same
            scheduler = workers = False
        return await super()._get_logs(cluster, scheduler, workers)

    def wait_for_workers(self, n_workers: int, timeout: float | str | None = None) -> Any:  # noqa: ANN401
        """Wait until so many workers are there, and show what their jobs do meanwhile.

        Raises
        ------
        JobError, SubmitError
            They will not come: the reason, and the end of the last job's log.
        TimeoutError
            They have not come within ``timeout`` seconds; the message says what their jobs do.

        """
        self._must_run()
        return self.sync(self._wait_for_workers, n_workers, timeout)

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | str | None = None) -> None:
        progress, limit_s = self._progress, parse_timedelta(timeout)
        try:
            async with asyncio.timeout(limit_s):
                while len(self.scheduler_info["workers"]) < n_workers:
                    self._must_run()
                    if error := self._given_up:
                        raise error
                    progress.show(self._line(n_workers))
                    self._changed.clear()
                    await self._changed.wait()
            await self._show_notes()
            progress.show(self._line(n_workers))
        except TimeoutError:
            raise TimeoutError(f"not {n_workers} workers within {limit_s:g} s: {self._line(n_workers)}") from None
        finally:
            progress.end()

    @property
    def _given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None when they may."""
        return JobError(why) if (why := self._session.trouble) else None

    def _line(self, wanted: int) -> str:
        """Return one line for the whole cluster."""
        workers = self.scheduler_info["workers"].values()
        return summary_line(self._views(), len(workers), wanted, len({facts["host"] for facts in workers}))

    def _views(self) -> Sequence[JobView]:
        """Return what people see of the jobs that have workers."""
        return ()

    async def _show_ready(self) -> None:
        self._first_workers = len(self.scheduler_info["workers"])
        await self._show_notes()
        self._progress.show(self._ready_line())
        self._progress.end()
        if self.dashboard_link and self._session.browser and not self.quiet:
            self._progress.say(*self._session.browser.lines)

    async def _show_notes(self) -> None:
        with contextlib.suppress(OSError):  # the connection has just broken: that is told elsewhere
            self._progress.show_notes(await self.scheduler_comm.hpcgpu_notes(), quiet=self.quiet)

    def _ready_line(self) -> str:
        return self._line(len(self.scheduler_info["workers"]))

    def _log(self, log: str) -> None:
        """Say something where distributed's clusters print it; warnings are said by the progress, quiet or not."""
        if not self.quiet:
            self._progress.say(log)

    def __await__(self) -> Any:  # noqa: ANN401
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
        except asyncio.CancelledError:
            await self._close()
            if self._session.keeps_job:
                raise JobError(f"job {self.job_id or '-'} was detached before its workers were there") from None
            raise
        except BaseException:
            await self._close()
            raise

    async def _connect(self) -> None:
        """Have the run's processes, and a connection to their scheduler."""
        job = await self._run.start(self._session, self._log)
        self.scheduler_comm = await self._session.connect(job, self._run.head)
        await self._run.connected(self._session)

    async def _start_again(self, scheduler: Any) -> None:  # noqa: ANN401
        """Do what distributed's cluster did at its start, with another connection."""
        old, comm = self.scheduler_comm, self._watch_worker_status_comm
        self._watch_worker_status_comm = None  # its end is no news any more
        if comm:
            await comm.close()
        if self._sync_cluster_info_task:
            self._sync_cluster_info_task.cancel()
        self.scheduler_comm = scheduler
        self._session.hold(scheduler)
        await super()._start()
        await old.close_rpc()

    async def _watch_worker_status(self, comm: Any) -> None:  # noqa: ANN401
        reason = "the scheduler closed the connection"
        try:
            await super()._watch_worker_status(comm)
        except Exception as e:  # distributed has logged it; from then on the workers known here would be those of then
            reason = f"what the scheduler says of its workers was not understood: {reason_of(e)}"
            comm.abort()
        if self.status == Status.running and comm is self._watch_worker_status_comm:
            self._session.lose(reason)

    def _update_worker_status(self, op: str, msg: Any) -> None:  # noqa: ANN401
        if self._state.end:
            return
        if op == "stalled":
            self.scheduler_info["stalled"] = msg
            self._progress.say(msg or "tasks go on again")
        else:
            super()._update_worker_status(op, msg)
        self._changed.set()

    def _over(self, end: End, words: str) -> None:
        """Be without a scheduler, and so without workers, from now on."""
        self._state.over(end, words)
        self.scheduler_info = without_workers(self.scheduler_info)

    def _lost(self, why: str) -> None:
        """Say that there is no scheduler any more, and end all waiting for it."""
        self._over(End.LOST, f"lost: {why}")
        self.status = Status.failed
        if self._adaptive:
            self._adaptive.stop()
        self._changed.set()
        self._progress.say(f"the cluster is lost: {why}")

    def detach(self) -> Any:  # noqa: ANN401
        """Leave the cluster running without this process; ``attach`` of its class takes it up again.

        It then runs until its time limit, ``hpcgpu stop``, or a client that shuts it down.

        Raises
        ------
        LaunchError
            The scheduler cannot be told; nothing has changed.

        """
        if self._run.job is None or self.status != Status.starting:
            self._must_run()
        detached = self.sync(self._detach)
        if not self.asynchronous:
            self._loop_runner.stop()
        return detached

    @abstractmethod
    async def _detach(self) -> None:
        """Leave the job running; ConfigError where it cannot go on."""

    def close(self, timeout: float | None = None) -> Any:  # noqa: ANN401
        """Close the cluster: its job ends, and so does the thread of its event loop."""
        closed = super().close(timeout)
        if not self.asynchronous:
            self._loop_runner.stop()
        return closed

    def shutdown(self) -> Any:  # noqa: ANN401
        """End the job, also where :meth:`close` would leave it running.

        Raises
        ------
        JobError
            This object has left the job already.

        """
        if self._state.end is End.LEFT:
            raise JobError(f"this {type(self).__name__} is {self._state_text}")
        self._session.keeps_job = False
        return self.close()

    async def _close(self) -> None:
        if self.status != Status.closed:
            self._closing = self._closing or asyncio.create_task(self._close_once())
            await asyncio.shield(self._closing)  # several may wait for it, and some not for long

    async def _close_once(self) -> None:
        session = self._session
        self.status = Status.closing
        self._changed.set()  # ends all waiting for workers
        self._progress.end()
        self._page.close()
        if not self._state.end and not session.is_searching:  # there is somebody to ask
            await self._remember_summary()
        await session.leave()
        await super()._close()
        self.status = Status.closing  # as long as the job is there
        try:
            await session.close()
            self._over(End.LEFT, self._closed_words())
            if not session.keeps_job:
                with self._progress.waiting("closing: waiting for the end of the job" + "s" * self._supports_scaling):
                    await self._end_jobs()
                await session.remove_folder()  # the guard needs it as long as a job may be there
                await self._run.ended()
                self._state.end = End.CLOSED
            await self._run.close()
        finally:
            self.status = Status.closed  # nothing is left to do: an event loop may end with it
            self._show_end()

    def _closed_words(self) -> str:
        """Return what becomes of this object."""
        return f"closed; it was {self._state.end_words}" if self._state.end is End.LOST else "closed"

    async def _end_jobs(self) -> None:
        if job := self._run.job:
            await job.end()
