"""A cluster object's hold on its run: the folder, the lease, and the connection to the scheduler, lost and reopened."""

from __future__ import annotations

import asyncio
import functools
import shlex
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.core import rpc

from hpcgpu import supervise
from hpcgpu.deploy.cluster import security_loader
from hpcgpu.deploy.cluster.batch_run import ClusterRun
from hpcgpu.deploy.jobs.runs import today
from hpcgpu.deploy.network import lease, scheduler_file
from hpcgpu.deploy.network.dashboard import BrowserLink, Tunnel
from hpcgpu.deploy.network.lease import LeaseHolder, keep_touched
from hpcgpu.deploy.network.scheduler_file import SchedulerFile, connect_first, security
from hpcgpu.deploy.progress import Progress
from hpcgpu.errors import HpcGpuError, JobError, LaunchError, TrustError, message_of
from hpcgpu.host import process
from hpcgpu.model import Patience
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_end import may_answer, why_missing
from hpcgpu.plan.jobs.job_text import describe

# The batch system is polled seldom (fleet), the files of the job often.
_POLL_S = 0.1
_REACH_S = 10.0


class Connection:
    """Holds a run for one cluster object, through all lives of the job with the scheduler.

    On the event loop's thread only; properties may be read by any thread.
    """

    _folder: Path  # the run's, from begin() on

    def __init__(
        self,
        run: ClusterRun,
        progress: Progress,
        patience: Patience,
        *,
        reconnected: Callable[[Any], Awaitable[None]],  # gets the connection pool of one that answers again
        lost: Callable[[str], None],  # takes the reason why there will be no scheduler any more
        changed: Callable[[], object],  # called when the search for it has news
    ) -> None:
        self._run, self._settings, self._progress, self._patience = run, run.settings, progress, patience
        self._reconnected, self._lost, self._changed = reconnected, lost, changed
        self.keeps_job = False  # the job goes on when this object closes
        self.scheduler_file: SchedulerFile | None = None  # of the scheduler that was reached last
        self.why_lost = ""  # why there is no connection to the scheduler at present; "" if there is one
        self.security = security(None)  # for connections to the scheduler: its certificate, and the key to it
        self.browser: BrowserLink | None = None  # leads browsers to the dashboard; None before the connection
        self._tunnel: Tunnel | None = None
        self._holder: LeaseHolder | None = None
        self._touching: supervise.Loop | None = None
        self._returning: supervise.Loop | None = None

    @property
    def is_searching(self) -> bool:
        """True if the scheduler does not answer, and is searched."""
        return self._returning is not None and not self._returning.task.done()

    async def search_ended(self) -> None:
        """Wait until the scheduler answers, or is given up."""
        if self._returning:
            await asyncio.wait([self._returning.task])

    @property
    def trouble(self) -> str:
        """Why the search for the scheduler does not work at present; "" if it does."""
        return self._returning.trouble if self._returning else ""

    async def begin(self) -> Path:
        """Join the run's folder, or make a new one and take its lease: a job without signs of life ends itself."""

        def begin() -> None:
            self._folder = self._run.make_folder()  # set at once: a start that is cancelled meanwhile removes it
            lease.touch(self._folder)

        await supervise.to_thread(begin)
        self._touching = keep_touched(self._folder, self._settings.client_grace_s)
        return self._folder

    async def connect(self) -> Any:
        """Wait for the scheduler, hold its lease, and return a connection pool to it (distributed's rpc).

        Raises JobError if the job has ended or its state cannot be read; LaunchError if no address answers, and there
        is no way through the batch system; TrustError if a process with another certificate answers.
        """
        scheduler = await self._reach(await supervise.until(self._look, _POLL_S))
        self.hold(scheduler)
        self.browser = BrowserLink(self._folder, self._settings.dashboard_port)
        await self._lead_browsers(scheduler)
        return scheduler

    def hold(self, scheduler: Any) -> None:
        """Hold the lease by this connection pool from now on."""
        if self._holder:
            self._holder.stop()
        is_detached = functools.partial(lease.is_detached, self._folder)
        self._holder = LeaseHolder(scheduler, self._settings.client_grace_s, self.lose, is_detached)

    def lose(self, reason: str) -> None:
        """Search the scheduler again; called whenever it seems to be gone."""
        self.why_lost = reason
        if not self.is_searching:
            assert self.scheduler_file
            return_ = functools.partial(self._return, reason, self.scheduler_file)
            self._returning = supervise.Loop(return_, "the search for this cluster's scheduler", changed=self._changed)

    async def detach(self, job_id: str) -> None:
        """Give the lease up: the job goes on. Raise LaunchError, without a change, if the scheduler is silent."""
        await supervise.to_thread(lease.detach, self._folder)
        try:
            if self._holder:
                await self._holder.detach()
        except (OSError, TimeoutError) as e:
            await supervise.to_thread(lease.take_up, self._folder)
            raise LaunchError(f"job {job_id} was not detached: its scheduler does not answer ({message_of(e)})") from e
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
        await self._close_tunnel()

    async def remove_folder(self) -> None:
        """Remove the run's folder; its jobs have ended."""
        if folder := getattr(self, "_folder", None):  # it has begun
            await supervise.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _return(self, reason: str, before: SchedulerFile) -> bool:
        """Take the scheduler up again, or report that the cluster is lost; return False if neither was possible."""
        try:
            scheduler = await self._reopen()
            await self._reconnected(scheduler)
            is_other_dashboard = await self._lead_browsers(scheduler)
        except HpcGpuError as e:
            if isinstance(e, JobError) and self._holder:
                self._holder.stop()
                self._holder = None  # no scheduler hears a goodbye
            self._lost(str(e))
            return True
        except OSError as e:
            if not await supervise.in_thread(self._folder.exists):
                self._lost(f"{reason}; its folder is gone: another process has stopped it")
                return True
            self._progress.say(f"the scheduler has answered and is gone again: {message_of(e)}")
            await asyncio.sleep(self._patience.ask_s)
            return False
        self.why_lost = ""
        again = "the cluster is back; make a new Client(cluster) if yours has closed"
        if self.scheduler_file and self.scheduler_file.restart_count > before.restart_count:
            again = f"{self._run.label} was requeued; its results are lost, {again}"
        self._progress.say(again)
        if is_other_dashboard and self.browser:
            self._progress.say(*self.browser.lines)
        return True

    async def _lead_browsers(self, scheduler: Any) -> bool:
        """Lead browsers to this scheduler's dashboard; return whether it is another one than before."""
        assert self.browser
        assert self.scheduler_file
        return await self.browser.lead_to(scheduler, self.scheduler_file.dashboard_secret)

    async def _reopen(self) -> Any:
        """Wait until the scheduler answers again, in the job's next life too; JobError if it is over, or not listed."""
        loop = asyncio.get_running_loop()
        since_s, again_s, has_told = loop.time(), 0.0, False
        attempt: asyncio.Task[Any] | None = None
        before = tried = await self._read()
        await self._run.check(poll=True)
        try:
            while True:
                facts = await self._read()
                if facts != before:  # the job ends, or has begun its next life
                    before = facts
                    await self._run.check(poll=True)
                target = facts if await self._runs(since_s) else None
                if target != tried:  # the attempt was for a life of the job that is over
                    if attempt:
                        attempt.cancel()
                    attempt, again_s = None, 0.0
                if target and attempt is None and loop.time() >= again_s:
                    attempt = asyncio.create_task(self._reach(target))
                tried = target
                await asyncio.sleep(_POLL_S)
                if attempt and attempt.done():
                    try:
                        return attempt.result()
                    except LaunchError as e:
                        if not has_told:
                            self._progress.say(f"{e}; hpcgpu tries again as long as {self._run.label} exists")
                    has_told, attempt, again_s = True, None, loop.time() + self._patience.ask_s
        finally:
            self._progress.end()
            if attempt:
                attempt.cancel()

    async def _runs(self, since_s: float) -> bool:
        """Show the job; return whether its scheduler may answer."""
        job = await self._run.check()
        if why := why_missing(job, since_s, asyncio.get_running_loop().time()):
            raise JobError(why)
        if not job.is_missing:
            self._show(replace(job, was_full=False))  # its workers may exist nevertheless: nothing counts them now
        return may_answer(job)

    async def _read(self) -> SchedulerFile | None:
        """Read the scheduler file; in a thread, since a file server may be silent for a while."""
        return await supervise.in_thread(scheduler_file.read, self._folder)

    async def _look(self) -> SchedulerFile | None:
        """Return the scheduler file; without one show the job and return None."""
        if facts := await self._read():
            return facts
        job = await self._run.check()
        if error := self._run.given_up:
            raise error
        workers = await supervise.in_thread(scheduler_file.read_progress, self._folder)
        self._show(job.registered(workers, asyncio.get_running_loop().time()))
        return None

    def _show(self, job: Job) -> None:
        self._progress.show(f"{self._run.label}: {describe(job, today()).text}")

    async def _reach(self, facts: SchedulerFile) -> Any:
        """Return a connection pool to the scheduler of a scheduler file; raise as :meth:`connect`."""
        await self._close_tunnel()
        self.scheduler_file, self.security = facts, security(facts.certificate)
        try:
            address = (await connect_first(facts.addresses, self.security, _REACH_S, "client")).address
        except TrustError:
            raise  # it would not be trusted through a tunnel either
        except LaunchError as e:
            address = await self._tunnel_to(facts, e)
        security_loader.remember(address, self.security)
        return rpc(address, connection_args=self.security.get_connection_args("client"))

    async def _tunnel_to(self, facts: SchedulerFile, direct: LaunchError) -> str:
        """Return the address of a tunnel through the batch system; ``direct``: why no address answers."""
        protocol, _, endpoint = facts.addresses[0].partition("://")
        python = self._settings.python or ""
        relay = process.python_argv("hpcgpu.host.relay", endpoint.rpartition(":")[2], python=python)
        argv = self._run.onto(facts.node, relay)
        self._tunnel = await Tunnel.open(argv)
        try:
            tunnel = f"{protocol}://{self._tunnel.address}"
            return (await connect_first([tunnel], self.security, _REACH_S, "client")).address
        except LaunchError as e:
            why = await self._tunnel.failure() or str(e)
            raise LaunchError(
                f"{direct}; nor through '{shlex.join(argv)}': {why}. "
                "Start this script on a node that reaches the compute nodes, or run it in the job: hpcgpu launch"
            ) from e

    async def _close_tunnel(self) -> None:
        if self._tunnel:
            await self._tunnel.close()
            self._tunnel = None
