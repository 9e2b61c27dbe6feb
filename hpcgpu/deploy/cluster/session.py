"""A cluster object's hold on its run: the folder, the lease, and the connection to the scheduler, lost and found."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgpu.deploy.cluster.connector import Connector
from hpcgpu.deploy.cluster.progress import Progress
from hpcgpu.deploy.cluster.run import ClusterRun
from hpcgpu.deploy.cluster.state import State
from hpcgpu.deploy.network import lease
from hpcgpu.deploy.network.dashboard import HANDLER, Forwarder, far_hint, link
from hpcgpu.deploy.network.lease import LeaseHolder, keep_touched
from hpcgpu.deploy.network.scheduler_file import SchedulerFile
from hpcgpu.deploy.network.tls import security
from hpcgpu.errors import HpcGpuError, JobError, LaunchError
from hpcgpu.host import private
from hpcgpu.model import Patience, Settings
from hpcgpu.supervise import tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks from the session into the cluster."""

    reconnected: Callable[
        [Any], Awaitable[None]
    ]  # takes the connection pool to a scheduler that answers again; or OSError
    lost: Callable[[str], None]  # takes the reason why there will be no scheduler any more
    changed: Callable[[], object]  # called when the search for the scheduler has news


class BrowserLink:
    """Lead browsers of this machine to the dashboard. Not thread-safe: for the thread of the event loop.

    Each object that is attached to the run has a file of its own in the run's folder, for people who see only a log.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._folder, self._port, self._secret = folder, port, ""
        self._scheduler: Any = None
        self._forwarder: Forwarder | None = None

    @property
    def url(self) -> str:
        """The address for the user's browser, with a secret; "" without a dashboard."""
        return link(self._forwarder.port, self._secret, os.environ) if self._forwarder else ""

    @property
    def lines(self) -> tuple[str, str]:
        """The way to the dashboard, which exists: for people, and for logs, without the secret."""
        assert self._forwarder
        hint = far_hint(self._forwarder.port, os.environ, socket.gethostname())
        return f"dashboard: {self.url}{hint}", f"dashboard: cat {self._file}{hint}"

    async def lead_to(self, scheduler: Any, secret: str) -> bool:
        """Lead to the dashboard of this scheduler (distributed's rpc); return whether it is another one than before.

        ``secret``: the first part of the dashboard's paths; "": it has none.
        """
        is_new, self._scheduler, self._secret = secret != self._secret, scheduler, secret
        if not secret or not is_new:
            return False
        self._forwarder = self._forwarder or await Forwarder.open(self._connect, lambda: self._secret, self._port)
        await tasks.to_thread(functools.partial(private.write, self._file, f"{self.url}\n"))
        return True

    async def close(self) -> None:
        """Close the port and remove the file."""
        if self._forwarder:
            self._forwarder.close()
            await tasks.to_thread(functools.partial(self._file.unlink, missing_ok=True))
            self._forwarder = None

    @property
    def _file(self) -> Path:
        assert self._forwarder
        return self._folder / f"dashboard-{self._forwarder.port}"

    async def _connect(self) -> Any:  # distributed's comm
        comm = await self._scheduler.live_comm()
        await comm.write({"op": HANDLER, "reply": False})
        return comm


class Session:
    """Holds a run for one cluster object, through all lives of the job with the scheduler: folder, lease, connection.

    On the event loop's thread only; properties may be read by any thread.
    """

    def __init__(self, settings: Settings, state: State, progress: Progress, patience: Patience, hooks: Hooks) -> None:
        self._settings, self._state, self._progress = settings, state, progress
        self._patience, self._hooks = patience, hooks
        self.folder: Path | None = None  # the run's
        self.keeps_job = False  # the job goes on when this object closes
        self.security = security(None)  # for connections to the scheduler: its certificate, and the key to it
        self._connector: Connector | None = None
        self._holder: LeaseHolder | None = None
        self._touching: tasks.Loop | None = None
        self._returning: tasks.Loop | None = None
        self.browser: BrowserLink | None = None  # leads browsers to the dashboard; None before the connection

    @property
    def scheduler_file(self) -> SchedulerFile | None:
        """The content of the scheduler file; None before the connection."""
        return self._connector.scheduler_file if self._connector else None

    @property
    def is_searching(self) -> bool:
        """True if the scheduler does not answer, and is searched."""
        return self._returning is not None and not self._returning.done()

    @property
    def trouble(self) -> str:
        """Why the search for the scheduler does not work at present; "" if it does."""
        return self._returning.trouble if self._returning else ""

    async def begin(self, make_folder: Callable[[], Path]) -> Path:
        """Make a new run's folder in a thread, and take its lease: a job without signs of life ends itself."""

        def begin() -> Path:
            self.folder = make_folder()  # known at once: a start that is cancelled meanwhile removes it
            lease.touch(self.folder)
            return self.folder

        return self.join(await tasks.to_thread(begin))

    def join(self, folder: Path) -> Path:
        """Give signs of life in the folder of an existing run."""
        self.folder = folder
        self._touching = keep_touched(folder, self._settings.client_grace_s)
        return folder

    async def connect(self, run: ClusterRun) -> Any:
        """Wait for the scheduler, hold its lease, and return a connection pool to it; raise as ``Connector.open``."""
        assert self.folder
        self._connector = Connector(self.folder, run, self._progress, self._patience, self._settings.python or "")
        scheduler = await self._connector.open()
        self.hold(scheduler)
        self.browser = BrowserLink(self.folder, self._settings.dashboard_port)
        await self._lead_browsers(scheduler)
        return scheduler

    async def _lead_browsers(self, scheduler: Any) -> bool:
        """Lead browsers to this scheduler's dashboard; return whether it is another one than before."""
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
        """Search the scheduler again; called whenever it seems to be gone."""
        self._state.trouble = reason
        if not self.is_searching:
            assert self._connector
            assert self.scheduler_file
            return_ = functools.partial(self._return, self._connector, reason, self.scheduler_file)
            self._returning = tasks.run_forever(
                return_, "the search for this cluster's scheduler", changed=self._hooks.changed
            )

    async def _return(self, connector: Connector, reason: str, before: SchedulerFile) -> bool:
        """Take the scheduler up again, in the job's next life too, or report that the cluster is lost.

        Returns False if neither was possible: try again.
        """
        try:
            scheduler = await connector.reopen(self._progress.say)
            await self._hooks.reconnected(scheduler)
            is_other_dashboard = await self._lead_browsers(scheduler)
        except HpcGpuError as e:
            if isinstance(e, JobError) and self._holder:
                self._holder.stop()
                self._holder = None  # no scheduler hears a goodbye
            self._hooks.lost(str(e))
            return True
        except OSError as e:
            if self.folder is None or not await asyncio.to_thread(self.folder.exists):
                self._hooks.lost(f"{reason}; its folder is gone: another process has stopped it")
                return True
            self._progress.say(f"the scheduler has answered and is gone again: {e}")
            await asyncio.sleep(self._patience.ask_s)
            return False
        self._state.trouble = ""
        again = "the cluster is back; make a new Client(cluster) if yours has closed"
        if connector.scheduler_file and connector.scheduler_file.restart_count > before.restart_count:
            again = f"{connector.label} was requeued; its results are lost, {again}"
        self._progress.say(again)
        if is_other_dashboard and self.browser:
            self._progress.say(*self.browser.lines)
        return True

    async def detach(self, job_id: str) -> None:
        """Give the lease up: the job goes on. Raise LaunchError, without a change, if the scheduler is silent."""
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
        """Stop the signs of life, and say goodbye unless the job goes on."""
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
