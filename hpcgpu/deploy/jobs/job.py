"""The one job of a cluster object: submitted, asked for, ended; the same as processes of this machine is in .local."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import batch_client
from hpcgpu.deploy.jobs.batch_client import ask, look, on_lost_nodes, proven, submit
from hpcgpu.deploy.jobs.record import RecordedJob
from hpcgpu.deploy.jobs.tail import tail
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.model import JobSpec, JobState, JobStatus, Patience
from hpcgpu.model.job import WAITING

# A job whose lease has ended is gone within 5 s.
_END_S = 10.0
_CANCEL_S = 20.0
_POLL_S = 0.5
# While slurmctld is away squeue says so after 40 s (22.05.8), and where SlurmctldTimeout is longer not within 60 s.
_SILENCE_S = 3.0
# A requeued job ends as others do: PBS takes 24 s for a qrerun, and a minute and more for output that nobody can take
# (E, 23.06.06), Slurm as long as an epilogue takes.
_LATE_S = 60.0


class Job(Protocol):
    """What a cluster needs of its job; one class for each way of having one."""

    script: str

    @property
    def id(self) -> str:
        """The batch system's id; empty before the submission."""

    @property
    def log(self) -> str:
        """Path of its output."""

    @property
    def status(self) -> JobStatus | None:
        """How it was when it was last asked about."""

    async def seems_over(self) -> bool:
        """Tell whether it has left a sign of its end, which the batch system may not know yet; asks nobody."""

    async def submit(self) -> None:
        """Ask for it; raises SubmitError in the batch system's words."""

    async def check(self) -> JobStatus | None:
        """Return how it is, None when it is not listed; raise JobError, with the tail of its log, when it has ended."""

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs another one on a node of the job."""

    async def end(self) -> None:
        """Wait a little for it to end by itself, then cancel it; return when it has ended."""


class SubmittedJob:
    """One job of a batch system that is there already.

    Parameters
    ----------
    recorded : RecordedJob
        As it was written down.
    system : BatchSystem
        Knows it.
    say : callable
        Takes a line for the user: what the job is doing.

    """

    def __init__(self, recorded: RecordedJob, system: BatchSystem, say: Callable[[str], None]) -> None:
        self.recorded, self.script = recorded, ""
        self._status: JobStatus | None = None
        self._ran_on: tuple[str, ...] = ()
        self._system, self._say = system, say
        self._said = ""
        self._over_since_s: float | None = None

    @property
    def id(self) -> str:
        """The batch system's id; empty before the submission."""
        return self.recorded.id

    @property
    def log(self) -> str:
        """Path of its output."""
        return self.recorded.log

    @property
    def status(self) -> JobStatus | None:
        """How it was when it was last asked about."""
        return self._status

    async def seems_over(self) -> bool:
        """Tell whether its script has left its exit code; a requeued one takes it away again."""
        file = self.recorded.exit_file
        return bool(file) and await asyncio.to_thread(Path(file).is_file)

    async def submit(self) -> None:
        """Do nothing: it has been submitted."""

    async def check(self) -> JobStatus | None:
        """Return how it is, None when it is not listed; raise JobError when it has ended, or will never start."""
        try:
            status = (await self._ask()).get(self.id)
        except SubmitError as e:
            self._tell(str(e))
            return JobStatus(JobState.UNKNOWN, "", "the batch system does not answer")
        if status is None:
            return None
        status = self._status = await asyncio.to_thread(self.recorded.with_exit_code, status)
        self._ran_on = status.hosts or self._ran_on
        said = ", ".join(filter(None, (status.reason, status.trouble)))
        reason = f" ({said})" if said else ""
        if status.state is JobState.ENDED:
            code = "" if status.exit_code is None else f", exit code {status.exit_code}"
            raise JobError(f"job {self.id} has ended: {status.native or 'gone'}{reason}{code}; {await self._tail()}")
        if status.state is JobState.RUNNING and await self._over_for_s() > _LATE_S:
            ended = f"job {self.id} has ended: {await self._exit_words()} {_LATE_S:g} s ago"
            still = f"though the batch system still has it in state {status.native}"
            raise JobError(f"{ended}, {still}; {await self._tail()}")
        if status.state is JobState.STUCK:
            advice = f" ({status.advice})" if status.advice else ""
            raise JobError(
                f"job {self.id} will not start: {status.native}{reason}. Ask for what there is{advice}, or ask the "
                "site's administrators about this job"
            )
        return status

    async def _tail(self) -> str:
        return await asyncio.to_thread(tail, Path(self.recorded.log))

    async def _over_for_s(self) -> float:
        """Return for how long its script has been seen to have ended: a requeued one is soon without that sign."""
        now_s = asyncio.get_running_loop().time()
        if not await self.seems_over():
            self._over_since_s = None
        elif self._over_since_s is None:
            self._over_since_s = now_s
        return 0.0 if self._over_since_s is None else now_s - self._over_since_s

    async def _exit_words(self) -> str:
        ended = await asyncio.to_thread(self.recorded.with_exit_code, JobStatus(JobState.ENDED, ""))
        code = ended.exit_code
        return "its script has ended" if code is None else f"its script has ended with exit code {code}"

    async def _ask(self) -> dict[str, JobStatus]:
        return await on_lost_nodes(self._system, await ask(self._system, [self.id]), ran_on={self.id: self._ran_on})

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs another one on a node of the job."""
        return self._system.onto(self.id, node, argv)

    async def end(self) -> None:
        """Wait for it to end by itself, then cancel it.

        Raises
        ------
        SubmitError
            It could not be cancelled, in the batch system's words.

        """
        if not self.id or await self._ends_within(_END_S):
            return
        try:
            await batch_client.close(self._system, [self.id], _CANCEL_S, self._tell)
        except SubmitError:
            if not await self.seems_over():  # its script has ended, whatever the batch system will say of it
                raise

    async def _ends_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            try:
                status = (await self._answer()).get(self.id)
            except SubmitError as e:
                self._tell(str(e))
                if await self.seems_over():
                    return True  # its script has ended, whatever the batch system will say of it
            else:
                if status is None or status.state is JobState.ENDED:
                    return True
                if status.state in WAITING:
                    return False  # it will not end by itself
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)

    async def _answer(self) -> dict[str, JobStatus]:
        """Ask about it; a batch system that is silent is not waited for once the job's script has ended.

        Raises
        ------
        SubmitError
            It said that it cannot answer, or nothing.

        """
        loop = asyncio.get_running_loop()
        asking, end_s = asyncio.create_task(ask(self._system, [self.id])), loop.time() + _SILENCE_S
        try:
            while not asking.done():
                await asyncio.wait([asking], timeout=_POLL_S)
                if loop.time() >= end_s and await self.seems_over():
                    words = await self._exit_words()
                    if not asking.done():
                        raise SubmitError(f"{words}; the batch system does not answer")
            return asking.result()
        finally:
            if asking.cancel():
                await asyncio.wait([asking])

    def _tell(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._say(f"job {self.id or '-'}: {what}")


class BatchJob(SubmittedJob):
    """One job of a batch system, to be submitted.

    Parameters
    ----------
    spec, script, system
        From :func:`hpcgpu.deploy.jobs.job_plan.plan_job`.
    say : callable
        Takes a line for the user: what the job is doing.
    patience : Patience
        With the answer to its submission.

    """

    def __init__(
        self, spec: JobSpec, script: str, system: BatchSystem, say: Callable[[str], None], patience: Patience
    ) -> None:
        super().__init__(RecordedJob(id="", log="", exit_file=spec.exit_file), system, say)
        self.script, self._spec, self._patience = script, spec, patience
        self._unsure: SubmitError | None = None

    async def submit(self) -> None:
        """Submit it; a refusal that may pass is tried again, any other raises SubmitError in the system's words."""
        for note in self._system.notes(self._spec):
            self._tell(note)
        try:
            job_id, *_ = await submit(self._system, self._spec, self.script, self._tell, self._patience)
        except SubmitError as e:
            self._unsure = e if e.unsure else None
            raise
        except asyncio.CancelledError:
            self._unsure = SubmitError("the submission was given up before it was answered", unsure=True)
            raise
        self._is(job_id)

    async def end(self) -> None:
        """Wait for it to end by itself, then cancel it; also when the answer to its submission was lost.

        Raises
        ------
        SubmitError
            It could not be cancelled, or the batch system does not say whether it is there.

        """
        if self._unsure:
            for job_id in await self._lost(self._unsure):
                self._is(job_id)
        await super().end()

    async def _ask(self) -> dict[str, JobStatus]:
        return await proven(self._system, self._spec, await super()._ask())

    async def _lost(self, unsure: SubmitError) -> tuple[str, ...]:
        try:
            return await look(self._system, self._spec.name, self._spec.mark, ())
        except SubmitError as e:
            raise SubmitError(
                f"{unsure}. The job may be there all the same ({e}); its guard, a process here, looks for it when this "
                "process has ended",
                evidence=unsure.evidence,
                transient=True,
            ) from e

    def _is(self, job_id: str) -> None:
        log = str(Path(self._system.log(self._spec, job_id)).absolute())
        self.recorded = replace(self.recorded, id=job_id, log=log)
