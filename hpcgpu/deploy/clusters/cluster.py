"""The cluster in Python: has its job started, finds the scheduler, holds the lease, ends the job."""

from __future__ import annotations

import asyncio
import inspect
import shutil
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from distributed import Client
from distributed.core import Status

from hpcgpu.config import doors, numpydoc
from hpcgpu.deploy import compat
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.clusters.connection import ConnectedCluster
from hpcgpu.deploy.jobs import record
from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.memory import memory, trim_memory
from hpcgpu.deploy.network import contact as contacts
from hpcgpu.deploy.network.lease import keep_touched
from hpcgpu.deploy.network.lease_file import touch
from hpcgpu.deploy.report import bindings
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import ConfigError, JobError
from hpcgpu.model import RunDocument
from hpcgpu.plan.jobs.phase import End
from hpcgpu.supervise import tasks


class GPUCluster(ConnectedCluster):
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

    door: ClassVar[str] = ""  # of config.doors: which options it refuses
    _supports_scaling = False

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Give the class a signature and a docstring with every option that it takes, for help() and completion."""
        super().__init_subclass__(**kwargs)
        own = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        refused = doors.unused(cls.door)
        cls.__signature__ = inspect.Signature([*numpydoc.parameters(refused), *own])
        cls.__doc__ = numpydoc.documented(cls.__doc__ or "", GPUCluster.__doc__ or "", refused)

    def __init__(self, *, asynchronous: bool = False, loop: Any = None, quiet: bool = False, **given: Any) -> None:  # noqa: ANN401
        self._make(self._read(given), asynchronous=asynchronous, loop=loop, quiet=quiet)
        self._begin()

    def _make(self, wanted: Wanted, *, asynchronous: bool, loop: Any = None, quiet: bool = False) -> None:  # noqa: ANN401
        self._wanted = wanted
        super().__init__(wanted.settings, asynchronous=asynchronous, loop=loop, quiet=quiet)
        self._touching: tasks.Loop | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._keep_job = False

    def _begin(self) -> None:
        """Start, unless that is for who awaits the object."""
        if not self.asynchronous:
            self._loop_runner.start()
            try:
                self.sync(self._start)
            except BaseException:
                self._loop_runner.stop()
                raise

    def _read(self, given: dict[str, Any]) -> Wanted:
        return wanted_settings.read(given, f"keyword {{name}} of {type(self).__name__}")

    @abstractmethod
    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        """Return the job that runs the document; nothing has been started."""

    def job_script(self) -> str:
        """Return what was submitted."""
        return self._job.script if self._job else ""

    def explain(self) -> str:
        """Return the settings with where each was set, what was submitted, and the way to the dashboard."""
        text = f"{wanted_settings.explain(self.settings)}\n{self.job_script()}"
        if (state := self._state) and not self._stalled:
            return f"{text}\nthis cluster is {state}\n"
        if facts := self._contact:
            text += f"\nscheduler of job {self.job_id or '-'} on {facts.node}\n"
        return f"{text}{way}\n" if (way := self._dashboard_way) else text

    def bindings(self) -> Any:  # noqa: ANN401 - a coroutine of an asynchronous cluster
        """Return what each worker is tied to, planned and actual: read back from the kernel, for all threads.

        Returns
        -------
        hpcgpu.deploy.report.Bindings
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(self._ask, bindings)

    def memory(self) -> Any:  # noqa: ANN401
        """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

        Returns
        -------
        hpcgpu.deploy.memory.Memory
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(self._ask, memory)

    def trim_memory(self) -> Any:  # noqa: ANN401
        """Have all workers give free memory back to the kernel; see :func:`hpcgpu.trim_memory`.

        Returns
        -------
        dict of str to int
            Bytes given back, by worker; an awaitable of it where the cluster is asynchronous.

        """
        self._must_run()
        return self.sync(self._ask, trim_memory)

    async def _ask(self, question: Callable[[Client], Any]) -> Any:  # noqa: ANN401
        async with Client(self, asynchronous=True, set_as_default=False) as client:
            try:
                return await question(client)
            finally:
                compat.release_loop(client)

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
            await self._start_job()
            await super()._start()
            await self._show_ready()
        except asyncio.CancelledError:
            await self._close()
            if self._keep_job:
                raise JobError(f"job {self.job_id or '-'} was detached before its workers were there") from None
            raise
        except BaseException:
            await self._close()
            raise

    async def _start_job(self) -> None:
        folder = self._folder = self._make_folder()
        touch(folder)  # from before the submission: who finds no sign of life ends the job
        self._touching = keep_touched(folder, self.settings.client_grace_s)
        run = RunDocument(settings=self.settings, shape="gang", meeting=str(folder))
        self._job = await asyncio.to_thread(self._make_job, run, folder)  # it may look for launchers
        await self._submit(self._job, run, folder)
        await self._connect()

    def _make_folder(self) -> Path:
        """Make the folder through which this process and the scheduler find each other: where all nodes see it."""
        return contacts.make_folder(record.home())

    async def _submit(self, job: Job, run: RunDocument, folder: Path) -> None:
        await job.submit()

    def detach(self) -> Any:  # noqa: ANN401
        """Leave the cluster running without this process; :meth:`attach` of its class takes it up again.

        It then runs until its time limit, ``hpcgpu stop``, or a client that shuts it down.

        Raises
        ------
        LaunchError
            The scheduler cannot be told; nothing has changed.

        """
        if self._job is None or self.status != Status.starting:
            self._must_run()
        detached = self.sync(self._detach)
        if not self.asynchronous:
            self._loop_runner.stop()
        return detached

    async def _detach(self) -> None:
        raise ConfigError("the processes of a local cluster die with this one: it cannot be detached")

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
        if self._end is End.LEFT:
            raise JobError(f"this {type(self).__name__} is {self._state}")
        self._keep_job = False
        return self.close()

    async def _close(self) -> None:
        if self.status == Status.closed:
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_once())
        await asyncio.shield(self._closing)  # several may wait for it, and some not for long

    async def _close_once(self) -> None:
        self.status = Status.closing
        self._changed.set()  # nobody waits for more workers
        self._progress.end()
        for task in (self._touching, self._returning):
            if task:
                task.cancel()
        if self._holder and self._keep_job:
            self._holder.stop()
        elif self._holder:
            await self._holder.goodbye()
        await super()._close()
        self.status = Status.closing  # as long as the job is there
        try:
            if self._way:
                await self._way.close()
            self._over(End.LEFT, self._closed_words())
            if not self._keep_job:
                await self._end_job()
                self._end = End.CLOSED
        finally:
            self.status = Status.closed

    def _closed_words(self) -> str:
        """Return what becomes of this object."""
        if self._end is End.LOST:
            return f"closed; it was {self._end_words}"
        return "closed"

    async def _end_job(self) -> None:
        await self._end_jobs()
        if self._folder:  # a guard needs it as long as one may be there
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_jobs(self) -> None:
        if self._job:
            await self._job.end()
