"""The one job of a cluster object: submitted, asked for, ended; the same as processes of this machine is in .local."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.ask import WAITING, ask, cancel, look, submit
from hpcgpu.deploy.jobs.record import RecordedJob
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.model import JobSpec, JobState, JobStatus

_TAIL_LINES = 30
# A job whose lease has ended is gone within 5 s.
_END_S = 10.0
_CANCEL_S = 20.0
_POLL_S = 0.5


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

    @property
    def seems_over(self) -> bool:
        """Tell whether it has left a sign of its end, which the batch system may not know yet; asks nobody."""

    async def submit(self) -> None:
        """Ask for it; raises SubmitError in the batch system's words."""

    async def check(self) -> JobStatus | None:
        """Return how it is, None when nobody knows it; raise JobError, with the tail of its log, when it has ended."""

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
        self._system, self._say = system, say
        self._said = ""

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

    @property
    def seems_over(self) -> bool:
        """Tell whether its script has left its exit code; a requeued one takes it away again."""
        return bool(self.recorded.exit_file) and Path(self.recorded.exit_file).is_file()

    async def submit(self) -> None:
        """Do nothing: it has been submitted."""

    async def check(self) -> JobStatus | None:
        """Return how it is, None when nobody knows it; raise JobError when it has ended, or will never start."""
        try:
            status = (await ask(self._system, [self.id])).get(self.id)
        except SubmitError as e:
            self._tell(str(e))
            return JobStatus(JobState.UNKNOWN, "", "the batch system does not answer")
        if status is None:
            return None
        status = self._status = self.recorded.with_exit_code(status)
        reason = f" ({status.reason})" if status.reason else ""
        if status.state is JobState.ENDED:
            code = "" if status.exit_code is None else f", exit code {status.exit_code}"
            log = Path(self.recorded.log)
            raise JobError(f"job {self.id} has ended: {status.native or 'gone'}{reason}{code}; {tail(log)}")
        if status.state is JobState.STUCK:
            raise JobError(
                f"job {self.id} will not start: {status.native}{reason}. Ask for what there is, or ask the site's "
                "administrators about this job"
            )
        return status

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
        await self._cancel()
        if not await self._ends_within(_CANCEL_S):
            self._tell(f"has been cancelled, but is still there after {_CANCEL_S:g} s")

    async def _cancel(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CANCEL_S
        while True:
            try:
                return await cancel(self._system, [self.id])
            except SubmitError as e:
                if not e.transient or loop.time() > deadline:
                    raise SubmitError(
                        f"job {self.id} may still be there: {e}. Its guard, a process here, goes on trying when this "
                        f"process has ended, or 'hpcgpu stop {self.id}' does",
                        evidence=e.evidence,
                        transient=e.transient,
                    ) from e
                self._tell(str(e))
            await asyncio.sleep(_POLL_S)

    async def _ends_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            try:
                status = (await ask(self._system, [self.id])).get(self.id)
            except SubmitError as e:
                self._tell(str(e))
                if self.seems_over:
                    return True  # its script has ended, whatever the batch system will say of it
            else:
                if status is None or status.state is JobState.ENDED:
                    return True
                if status.state in WAITING:
                    return False  # it will not end by itself
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)

    def _tell(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._say(f"job {self.id or '-'}: {what}")


class BatchJob(SubmittedJob):
    """One job of a batch system, to be submitted.

    Parameters
    ----------
    spec, script, system
        From :func:`hpcgpu.deploy.jobs.submit.plan_job`.
    say : callable
        Takes a line for the user: what the job is doing.

    """

    def __init__(self, spec: JobSpec, script: str, system: BatchSystem, say: Callable[[str], None]) -> None:
        super().__init__(RecordedJob(id="", log="", exit_file=spec.exit_file), system, say)
        self.script, self._spec = script, spec
        self._unsure: SubmitError | None = None

    async def submit(self) -> None:
        """Submit it; a refusal that may pass is tried again, any other raises SubmitError in the system's words."""
        try:
            job_id, *_ = await submit(self._system, self._spec, self.script, self._tell)
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
            It could not be cancelled, or nobody can say whether it is there.

        """
        if self._unsure:
            for job_id in await self._lost(self._unsure):
                self._is(job_id)
        await super().end()

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


def tail(log: Path) -> str:
    """Return the end of a log with its path, for an error."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return (
            f"its log {log} is not there: it had not begun, or its node could not write there (log_directory= takes a "
            "folder that all nodes see)"
        )
    except OSError as e:
        return f"its log {log} cannot be read ({e.strerror})"
    if not lines:
        return f"its log {log} is empty"
    shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"the end of its log {log}:\n{shown}"
