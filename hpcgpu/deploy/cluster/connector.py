"""From this process to the scheduler of a run: by its scheduler file, an address that answers, or a tunnel."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.core import rpc
from distributed.security import Security

from hpcgpu.deploy.cluster.progress import Progress
from hpcgpu.deploy.jobs.job import Head, Job
from hpcgpu.deploy.jobs.local import LocalJob
from hpcgpu.deploy.jobs.rows import today
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.network.connect_first import connect_first
from hpcgpu.deploy.network.scheduler_file import SchedulerFile
from hpcgpu.deploy.network.tls import security
from hpcgpu.deploy.network.tunnel import Tunnel
from hpcgpu.errors import JobError, LaunchError, TrustError
from hpcgpu.host import process
from hpcgpu.model import Patience
from hpcgpu.plan.jobs.ends import may_answer, why_missing
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.phase import describe
from hpcgpu.supervise import tasks

# The batch system is asked seldom (job_loop), the files of the job are looked at all the time.
_POLL_S = 0.1
_REACH_S = 10.0


class Connector:
    """How the scheduler of a run is found and reached, in each of its job's lives.

    Parameters
    ----------
    folder : Path
        The run's folder, in which rank 0 writes the scheduler file.
    job : Job
        The job that has the scheduler: the way to its node.
    head : Head
        How that job is.
    progress : Progress
        Shows what the job is doing.
    patience : Patience
        With the batch system.
    python : str
        The Python on the job's nodes; empty for this one.

    Attributes
    ----------
    scheduler_file : SchedulerFile or None
        That of the scheduler that was reached last.

    """

    def __init__(
        self, folder: Path, job: Job, head: Head, progress: Progress, patience: Patience, python: str = ""
    ) -> None:
        self.scheduler_file: SchedulerFile | None = None
        self._head, self._progress, self._patience = head, progress, patience
        self._folder, self._job, self._python = folder, job, python
        self._tunnel: Tunnel | None = None

    @property
    def job_id(self) -> str:
        """The batch system's id of the job that has the scheduler."""
        return self._job.id

    @property
    def security(self) -> Security:
        """For connections to the scheduler; before its file is read, that of plain TCP."""
        return security(self.scheduler_file.certificate if self.scheduler_file else None)

    async def open(self) -> Any:  # distributed's rpc
        """Wait for the scheduler file, and return a connection pool to the scheduler.

        Raises
        ------
        JobError
            The job has ended, or it cannot be known how it is.
        LaunchError
            No address answers, and there is no way through the batch system; a TrustError when one answers that
            has another certificate.

        """
        return await self.connect(await self._wait_for_file())

    async def reopen(self, say: Callable[[str], None]) -> Any:
        """Wait until the scheduler answers again, that of this life of the job or of its next one; see :meth:`open`.

        Raises
        ------
        JobError
            The job has ended, or has not been listed for 30 s.

        """
        loop = asyncio.get_running_loop()
        since_s, again_s, said = loop.time(), 0.0, False
        attempt: asyncio.Task[Any] | None = None
        before = tried = await self._read()
        await self._head.news()
        try:
            while True:
                there = await self._read()
                if there != before:  # the job ends, or has begun its next life
                    before = there
                    await self._head.news()
                found = there if await self._runs(since_s) else None
                if found != tried:  # the life of the job that it was for is over
                    if attempt:
                        attempt.cancel()
                    attempt, again_s = None, 0.0
                if found and attempt is None and loop.time() >= again_s:
                    attempt = asyncio.create_task(self.connect(found))
                tried = found
                await asyncio.sleep(_POLL_S)
                if attempt and attempt.done():
                    try:
                        return attempt.result()
                    except LaunchError as e:
                        if not said:
                            say(f"{e}; it is tried again as long as job {self._job.id} is there")
                    said, attempt, again_s = True, None, loop.time() + self._patience.ask_s
        finally:
            if attempt:
                attempt.cancel()

    async def _runs(self, since_s: float) -> bool:
        """Show how the job is; tell whether its scheduler may answer."""
        facts = await self._head.check()
        if why := why_missing(facts, since_s, asyncio.get_running_loop().time()):
            raise JobError(why)
        if not facts.is_missing:
            self._show(replace(facts, was_full=False))  # its workers may be there all the same: nobody can say it now
        return may_answer(facts)

    async def connect(self, facts: SchedulerFile) -> Any:
        """Return a connection pool to the scheduler of a scheduler file."""
        await self._close_tunnel()
        self.scheduler_file = facts
        address = await self._find_address(facts)
        return rpc(address, connection_args=self.security.get_connection_args("client"))

    async def close(self) -> None:
        """End the tunnel, if there is one."""
        await self._close_tunnel()

    async def _close_tunnel(self) -> None:
        if self._tunnel:
            await self._tunnel.close()
            self._tunnel = None

    async def _read(self) -> SchedulerFile | None:
        """Return what the scheduler file says; in a thread, since a file server may be silent for a while."""
        return await asyncio.to_thread(scheduler_file.read, self._folder)

    async def _wait_for_file(self) -> SchedulerFile:
        """Look for the scheduler file all the time, and show what the job is doing."""
        return await tasks.until(self._look, _POLL_S)

    async def _look(self) -> SchedulerFile | None:
        if found := await self._read():
            return found
        job = await self._head.check()
        if self._head.trouble:
            raise JobError(self._head.trouble)
        there = await asyncio.to_thread(scheduler_file.read_progress, self._folder)
        self._show(job.registered(there, asyncio.get_running_loop().time()))
        return None

    def _show(self, job: JobFacts) -> None:
        self._progress.show(
            f"{'pid' if isinstance(self._job, LocalJob) else 'job'} {job.id}: {describe(job, today()).text}"
        )

    async def _find_address(self, facts: SchedulerFile) -> str:
        """Return an address of the scheduler that answers: its own, or that of a tunnel through the batch system."""
        try:
            return (await connect_first(facts.addresses, self.security, _REACH_S, "client")).address
        except TrustError:
            raise  # it would not be trusted through a tunnel either
        except LaunchError as e:
            direct = e
        protocol, _, endpoint = facts.addresses[0].partition("://")
        relay = process.python_argv("hpcgpu.host.relay", endpoint.rpartition(":")[2], python=self._python)
        argv = self._job.onto(facts.node, relay)
        self._tunnel = await Tunnel.open(argv)
        try:
            return (
                await connect_first([f"{protocol}://{self._tunnel.address}"], self.security, _REACH_S, "client")
            ).address
        except LaunchError as e:
            why = await self._tunnel.failure() or str(e)
            raise LaunchError(
                f"{direct}; nor through '{shlex.join(argv)}': {why}. "
                "Start this script on a node that reaches the compute nodes, or run it in the job: hpcgpu launch"
            ) from e
