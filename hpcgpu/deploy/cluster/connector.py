"""Connect to the scheduler of a run: by its scheduler file, an address that answers, or a tunnel."""

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
from hpcgpu.deploy.cluster.run import ClusterRun
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
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.phase import describe
from hpcgpu.supervise import tasks

# The batch system is polled seldom (job_loop), the files of the job often.
_POLL_S = 0.1
_REACH_S = 10.0


class Connector:
    """Searches and reaches the scheduler of a run, in each life of the job that has it.

    Rank 0 writes the scheduler file in ``folder``, the run's; ``python`` runs on the job's nodes, "": this one.
    """

    def __init__(self, folder: Path, run: ClusterRun, progress: Progress, patience: Patience, python: str = "") -> None:
        self.scheduler_file: SchedulerFile | None = None  # of the scheduler that was reached last
        self._folder, self._run, self._python = folder, run, python
        self._progress, self._patience = progress, patience
        self._tunnel: Tunnel | None = None

    @property
    def label(self) -> str:
        """The job with the scheduler, for people."""
        return self._run.label

    @property
    def security(self) -> Security:
        """For connections to the scheduler; before its file is read, that of plain TCP."""
        return security(self.scheduler_file.certificate if self.scheduler_file else None)

    async def open(self) -> Any:
        """Wait for the scheduler file, and return a connection pool to the scheduler (distributed's rpc).

        Raises JobError if the job has ended or its state cannot be read; LaunchError if no address answers, and there
        is no way through the batch system; TrustError if a process with another certificate answers.
        """
        return await self.connect(await tasks.until(self._look, _POLL_S))

    async def reopen(self, say: Callable[[str], None]) -> Any:
        """Wait until the scheduler answers again, in this life of the job or its next one; return as :meth:`open`.

        Raises JobError if the job has ended, or has not been listed for 30 s.
        """
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
                    attempt = asyncio.create_task(self.connect(target))
                tried = target
                await asyncio.sleep(_POLL_S)
                if attempt and attempt.done():
                    try:
                        return attempt.result()
                    except LaunchError as e:
                        if not has_told:
                            say(f"{e}; hpcgpu tries again as long as {self._run.label} exists")
                    has_told, attempt, again_s = True, None, loop.time() + self._patience.ask_s
        finally:
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

    async def connect(self, facts: SchedulerFile) -> Any:
        """Return a connection pool to the scheduler of a scheduler file."""
        await self.close()
        self.scheduler_file = facts
        address = await self._find_address(facts)
        return rpc(address, connection_args=self.security.get_connection_args("client"))

    async def close(self) -> None:
        """End the tunnel, if there is one."""
        if self._tunnel:
            await self._tunnel.close()
            self._tunnel = None

    async def _read(self) -> SchedulerFile | None:
        """Read the scheduler file; in a thread, since a file server may be silent for a while."""
        return await asyncio.to_thread(scheduler_file.read, self._folder)

    async def _look(self) -> SchedulerFile | None:
        """Return the scheduler file; without one show the job and return None."""
        if facts := await self._read():
            return facts
        job = await self._run.check()
        if self._run.trouble:
            raise JobError(self._run.trouble)
        workers = await asyncio.to_thread(scheduler_file.read_progress, self._folder)
        self._show(job.registered(workers, asyncio.get_running_loop().time()))
        return None

    def _show(self, job: Job) -> None:
        self._progress.show(f"{self._run.label}: {describe(job, today()).text}")

    async def _find_address(self, facts: SchedulerFile) -> str:
        """Return an address that answers: the scheduler's, or that of a tunnel through the batch system."""
        try:
            return (await connect_first(facts.addresses, self.security, _REACH_S, "client")).address
        except TrustError:
            raise  # it would not be trusted through a tunnel either
        except LaunchError as e:
            direct = e
        protocol, _, endpoint = facts.addresses[0].partition("://")
        relay = process.python_argv("hpcgpu.host.relay", endpoint.rpartition(":")[2], python=self._python)
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
