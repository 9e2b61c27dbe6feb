"""From this process to the scheduler of a run: by its contact file, an address that answers, or a tunnel."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.core import rpc
from distributed.security import Security

from hpcgpu.deploy.cluster.progress import Progress
from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.jobs.rows import today
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.network.connect_first import connect_first
from hpcgpu.deploy.network.scheduler_file import SchedulerFile
from hpcgpu.deploy.network.tls import security
from hpcgpu.deploy.network.tunnel import Tunnel
from hpcgpu.errors import JobError, LaunchError, TrustError
from hpcgpu.host import process
from hpcgpu.model import JobState, Patience
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.phase import describe
from hpcgpu.plan.jobs.polling import poll_in_s
from hpcgpu.supervise import tasks

# The batch system is asked seldom, the files of the job are looked at all the time.
_POLL_S = 0.1
_MOMENT_S = 10.0
_REACH_S = 10.0
_MISSING_S = 30.0


class Connector:
    """How the scheduler of a run is found and reached, in each of its job's lives.

    Parameters
    ----------
    folder : Path
        The run's folder, in which rank 0 writes its contact.
    job : Job
        The job that has the scheduler: asked while there is no contact, and the way to its node.
    expected : int
        Workers of the job.
    progress : Progress
        Shows what the job is doing.
    patience : Patience
        With the batch system.
    python : str
        The Python on the job's nodes; empty for this one.

    Attributes
    ----------
    contact : SchedulerFile or None
        The one that was reached last.

    """

    def __init__(
        self, folder: Path, job: Job, expected: int, progress: Progress, patience: Patience, python: str = ""
    ) -> None:
        self.contact: SchedulerFile | None = None
        self._expected, self._progress, self._patience = expected, progress, patience
        self._folder, self._job, self._python = folder, job, python
        self._tunnel: Tunnel | None = None
        self._learning: asyncio.Task[None] | None = None
        self._over_since_s: float | None = None
        self._known_s = 0.0

    @property
    def job_id(self) -> str:
        """The batch system's id of the job that has the scheduler."""
        return self._job.id

    @property
    def security(self) -> Security:
        """For connections to the scheduler; without a contact, that of plain TCP."""
        return security(self.contact.certificate if self.contact else None)

    async def open(self) -> Any:  # noqa: ANN401 - distributed's rpc
        """Wait for the contact, and return a connection pool to the scheduler.

        Raises
        ------
        JobError
            The job has ended.
        LaunchError
            No address answers, and there is no way through the batch system; a TrustError when one answers that
            has another certificate.

        """
        found = await self._wait_for_contact()
        if self._job.status is None or self._job.status.state is not JobState.RUNNING:
            self._learning = tasks.start(self._learn_nodes, "asking on which nodes the job runs", tasks.say_only)
        return await self.connect(found)

    async def _learn_nodes(self) -> None:
        """Ask, a few times at most, until the batch system says on which nodes the job runs: a lost one is to be named.

        The contact may be there before that: the batch system is asked seldom. Nobody waits for the answer.
        """
        with contextlib.suppress(JobError):  # the end of a job is seen by its connection
            for wait_s in self._patience.retries_s:
                status = await self._job.check()
                if status and status.state is JobState.RUNNING:
                    return
                await asyncio.sleep(wait_s)

    async def reopen(self, say: Callable[[str], None]) -> Any:  # noqa: ANN401
        """Wait until the scheduler answers again, that of this life of the job or of its next one; see :meth:`open`.

        Raises
        ------
        JobError
            The job has ended, or has not been listed for 30 s.

        """
        self._known_s, said = asyncio.get_running_loop().time(), False
        attempt: asyncio.Task[Any] | None = None
        tried: SchedulerFile | None = None
        try:
            while True:
                found = await self._read() if await self._runs() else None
                if attempt and found != tried:  # the life of the job that it was for is over
                    attempt.cancel()
                    attempt = None
                if found and attempt is None:
                    attempt, tried = asyncio.create_task(self.connect(found)), found
                await self._news(attempt)
                if attempt and attempt.done():
                    try:
                        return attempt.result()
                    except LaunchError as e:
                        if not said:
                            say(f"{e}; it is tried again as long as job {self._job.id} is there")
                    said, attempt = True, None
                    await self._news()
        finally:
            if attempt:
                attempt.cancel()

    async def _runs(self) -> bool:
        """Ask about the job, and show how it is; tell whether its scheduler may answer."""
        status, now_s = await self._job.check(), asyncio.get_running_loop().time()
        if status is None:
            if now_s - self._known_s > _MISSING_S:
                raise JobError(f"the batch system has not known job {self._job.id} for {_MISSING_S:g} s")
            return False
        self._known_s = now_s
        self._show(JobFacts(id=self._job.id, submitted_s=now_s, expected=self._expected).listed(status, now_s))
        return status.state in (JobState.RUNNING, JobState.UNKNOWN)

    async def connect(self, facts: SchedulerFile) -> Any:  # noqa: ANN401
        """Return a connection pool to the scheduler of a contact."""
        await self._close_tunnel()
        self.contact = facts
        address = await self._find_address(facts)
        return rpc(address, connection_args=self.security.get_connection_args("client"))

    async def close(self) -> None:
        """End what is under way, and the tunnel, if there is one."""
        if self._learning:
            self._learning.cancel()
        await self._close_tunnel()

    async def _close_tunnel(self) -> None:
        if self._tunnel:
            await self._tunnel.close()
            self._tunnel = None

    async def _news(self, attempt: asyncio.Task[Any] | None = None) -> None:
        """Return when it is time to ask about the job again: it seems to have ended or to live again, or after long.

        An attempt to connect that is over is news, too.
        """
        loop = asyncio.get_running_loop()
        asked_s, contact = loop.time(), await self._read()
        while (since_s := loop.time() - asked_s) < self._patience.ask_s and await self._read() == contact:
            if (attempt and attempt.done()) or (since_s >= self._patience.news_s and await self._has_just_ended()):
                return
            await asyncio.sleep(_POLL_S)

    async def _read(self) -> SchedulerFile | None:
        """Return the contact; in a thread, since a file server may be silent for a while."""
        return await asyncio.to_thread(scheduler_file.read, self._folder)

    async def _has_just_ended(self) -> bool:
        """Tell whether the job seems to have ended a moment ago: the batch system is about to know it."""
        now_s = asyncio.get_running_loop().time()
        if not await self._job.seems_over():
            self._over_since_s = None
        elif self._over_since_s is None:
            self._over_since_s = now_s
        return self._over_since_s is not None and now_s - self._over_since_s < _MOMENT_S

    async def _wait_for_contact(self) -> SchedulerFile:
        """Look for the contact all the time, and ask the batch system seldom; show what the job is doing."""
        loop = asyncio.get_running_loop()
        asked_s, first = loop.time(), True
        job = JobFacts(id=self._job.id, submitted_s=asked_s, expected=self._expected)
        while (found := await self._read()) is None:
            soon = (first or await self._has_just_ended()) and loop.time() - asked_s >= self._patience.news_s
            if soon or poll_in_s(loop.time(), asked_s, [job], patience=self._patience) == 0:
                asked_s, first = loop.time(), False
                job = job.listed(await self._job.check(), loop.time())
            there = await asyncio.to_thread(scheduler_file.read_progress, self._folder)
            self._show(job.registered(there, loop.time()))
            await asyncio.sleep(_POLL_S)
        return found

    def _show(self, job: JobFacts) -> None:
        self._progress.show(f"job {job.id}: {describe(job, today()).text}")

    async def _find_address(self, facts: SchedulerFile) -> str:
        """Return an address of the scheduler that answers: its own, or that of a tunnel through the batch system."""
        try:
            return (await connect_first(facts.addresses, self.security, _REACH_S, "client")).address
        except TrustError:
            raise  # it would not be trusted through a tunnel either
        except LaunchError as e:
            direct = e
        protocol, _, place = facts.addresses[0].partition("://")
        relay = process.python_argv("hpcgpu.host.relay", place.rpartition(":")[2], python=self._python)
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
