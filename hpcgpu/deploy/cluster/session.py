"""A cluster object's hold on its run: the folder, the lease, and the connection to the scheduler, lost and found."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgpu.deploy.cluster.browser_link import BrowserLink
from hpcgpu.deploy.cluster.connector import Connector
from hpcgpu.deploy.cluster.progress import Progress
from hpcgpu.deploy.cluster.state import State
from hpcgpu.deploy.jobs.job import Head, Job
from hpcgpu.deploy.network import lease
from hpcgpu.deploy.network.lease import LeaseHolder, keep_touched
from hpcgpu.deploy.network.scheduler_file import SchedulerFile
from hpcgpu.deploy.network.tls import security
from hpcgpu.errors import HpcGpuError, JobError, LaunchError
from hpcgpu.model import Patience, Settings
from hpcgpu.supervise import tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The functions of a cluster that its session calls.

    Attributes
    ----------
    found : coroutine function
        Takes a connection pool to the scheduler that was found again. OSError: it is gone again.
    lost : callable
        Takes the reason: there will be no scheduler any more.
    changed : callable
        Called when the search for the scheduler has news.

    """

    found: Callable[[Any], Awaitable[None]]
    lost: Callable[[str], None]
    changed: Callable[[], object]


class Session:
    """One cluster object's hold on a run, through all lives of the job that has the scheduler.

    On the event loop's thread only; properties may be read by any thread.

    Parameters
    ----------
    settings : Settings
        Of the run.
    state : State
        Is told why there is no connection.
    progress : Progress
        Shows what the job does.
    patience : Patience
        With the batch system.
    hooks : Hooks
        The cluster.

    Attributes
    ----------
    folder : Path or None
        The run's.
    keeps_job : bool
        The job goes on when this object closes.
    security : Security
        For connections to the scheduler: its certificate, and the key to it.
    browser : BrowserLink or None
        Leads browsers to the dashboard; None before the connection.

    """

    def __init__(self, settings: Settings, state: State, progress: Progress, patience: Patience, hooks: Hooks) -> None:
        self._settings, self._state, self._progress = settings, state, progress
        self._patience, self._hooks = patience, hooks
        self.folder: Path | None = None
        self.keeps_job = False
        self.security = security(None)
        self._connector: Connector | None = None
        self._holder: LeaseHolder | None = None
        self._touching: tasks.Loop | None = None
        self._returning: tasks.Loop | None = None
        self.browser: BrowserLink | None = None

    @property
    def scheduler_file(self) -> SchedulerFile | None:
        """The content of the scheduler file; None before the connection."""
        return self._connector.scheduler_file if self._connector else None

    @property
    def is_searching(self) -> bool:
        """Whether the scheduler does not answer, and is looked for."""
        return self._returning is not None and not self._returning.done()

    @property
    def trouble(self) -> str:
        """Why the scheduler is not even looked for at present; empty when all is well."""
        return self._returning.trouble if self._returning else ""

    async def begin(self, make_folder: Callable[[], Path]) -> Path:
        """Make a new run's folder, and take its lease: a job that finds no sign of life ends itself.

        Parameters
        ----------
        make_folder : callable
            Called in a thread.

        """

        def begin() -> Path:
            self.folder = make_folder()  # known at once: a start that is cancelled meanwhile removes it
            lease.touch(self.folder)
            return self.folder

        folder = await tasks.to_thread(begin)
        self.join(folder)
        return folder

    def join(self, folder: Path) -> None:
        """Give signs of life in the folder of a run that is there."""
        self.folder = folder
        self._touching = keep_touched(folder, self._settings.client_grace_s)

    async def connect(self, job: Job, head: Head) -> Any:  # distributed's rpc
        """Wait for the scheduler, hold its lease, and return a connection pool to it.

        Parameters
        ----------
        job : Job
            The one that has the scheduler.
        head : Head
            How it is.

        Raises
        ------
        JobError, LaunchError
            As of :meth:`hpcgpu.deploy.cluster.connector.Connector.open`.

        """
        assert self.folder
        python = self._settings.python or ""
        self._connector = Connector(self.folder, job, head, self._progress, self._patience, python)
        scheduler = await self._connector.open()
        self.hold(scheduler)
        self.browser = BrowserLink(self.folder, self._settings.dashboard_port)
        await self._lead_browsers(scheduler)
        return scheduler

    async def _lead_browsers(self, scheduler: Any) -> bool:
        """Let browsers reach this scheduler's dashboard; return whether it is another one than before."""
        assert self.browser
        assert self.scheduler_file
        return await self.browser.lead_to(scheduler, self.scheduler_file.dashboard_secret)

    def hold(self, scheduler: Any) -> None:
        """Hold the lease by this connection pool from now on."""
        assert self.folder
        assert self._connector
        self.security = self._connector.security
        if self._holder:
            self._holder.stop()
        is_detached = functools.partial(lease.is_detached, self.folder)
        self._holder = LeaseHolder(scheduler, self._settings.client_grace_s, self.lose, is_detached)

    def lose(self, reason: str) -> None:
        """Look for the scheduler again; called whenever it seems to be gone."""
        self._state.trouble = reason
        if not self.is_searching:
            assert self._connector
            assert self.scheduler_file
            return_ = functools.partial(self._return, self._connector, reason, self.scheduler_file)
            what = "the search for this cluster's scheduler"
            self._returning = tasks.run_forever(return_, what, changed=self._hooks.changed)

    async def _return(self, connector: Connector, reason: str, before: SchedulerFile) -> bool:
        """Take the scheduler up again, that of the job's next life too; say so, or why the cluster is lost.

        Returns whether either is so; else it is to be tried again.
        """
        try:
            scheduler = await connector.reopen(self._progress.say)
            await self._hooks.found(scheduler)
            is_other_dashboard = await self._lead_browsers(scheduler)
        except HpcGpuError as e:
            if isinstance(e, JobError) and self._holder:
                self._holder.stop()
                self._holder = None  # nobody hears a goodbye
            self._hooks.lost(str(e))
            return True
        except OSError as e:
            if self.folder is None or not await asyncio.to_thread(self.folder.exists):
                self._hooks.lost(f"{reason}; its folder is gone: somebody has stopped it")
                return True
            self._progress.say(f"the scheduler has answered and is gone again: {e}")
            await asyncio.sleep(self._patience.ask_s)
            return False
        self._state.trouble = ""
        again = "the cluster is back; make a new Client(cluster) if yours has closed"
        if connector.scheduler_file and connector.scheduler_file.restart_count > before.restart_count:
            again = f"job {connector.job_id} was requeued; its results are lost, {again}"
        self._progress.say(again)
        if is_other_dashboard and self.browser:
            self._progress.say(*self.browser.lines)
        return True

    async def detach(self, job_id: str) -> None:
        """Give the lease up on purpose: the job goes on.

        Raises
        ------
        LaunchError
            The scheduler cannot be told; nothing has changed.

        """
        assert self.folder
        await tasks.to_thread(functools.partial(lease.detach, self.folder))
        try:
            if self._holder:
                await self._holder.detach()
        except (OSError, TimeoutError) as e:
            await tasks.to_thread(functools.partial(lease.take_up, self.folder))
            raise LaunchError(f"job {job_id} was not detached: its scheduler does not answer ({e})") from e
        self.keeps_job = True

    async def leave(self) -> None:
        """Give no more signs of life, and say goodbye unless the job goes on."""
        for loop in (self._touching, self._returning):
            if loop:
                loop.cancel()
        if self._holder and self.keeps_job:
            self._holder.stop()
        elif self._holder:
            await self._holder.goodbye()

    async def close(self) -> None:
        """End the connection; called last."""
        if self.browser:
            await self.browser.close()
        if self._connector:
            await self._connector.close()

    async def remove_folder(self) -> None:
        """Remove the run's folder; its jobs have ended."""
        if self.folder:
            await tasks.to_thread(functools.partial(shutil.rmtree, self.folder, ignore_errors=True))
