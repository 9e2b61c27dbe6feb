"""The job with the scheduler: submit and end it; as processes of this machine it is in .local."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import ending
from hpcgpu.deploy.jobs.job_plan import make_log_folder
from hpcgpu.deploy.jobs.record import RecordedJob
from hpcgpu.deploy.jobs.submitter import Submitter
from hpcgpu.errors import SubmitError
from hpcgpu.model import JobSpec, Patience
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.supervise import tasks

_NOT_YET = RecordedJob(id="", log="")
# A job whose lease has ended is gone within 5 s.
_END_S = 10.0
_CANCEL_S = 20.0


class Job(Protocol):
    """The job with the scheduler, as a cluster uses it: a batch system's, or processes of this machine."""

    @property
    def script(self) -> str:
        """Its script or command, as text; "" for a job of another process."""

    @property
    def id(self) -> str:
        """The batch system's id; "" before the submission."""

    @property
    def log(self) -> str:
        """Path of its output."""

    async def submit(self) -> None:
        """Submit it; raise SubmitError in the batch system's words."""

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of the job."""

    async def end(self) -> None:
        """Wait a little for it to end by itself, then cancel it; return when it has ended."""


class Head(Protocol):
    """The state of the job with the scheduler; of a batch system's job, its row in the table of jobs."""

    @property
    def trouble(self) -> str:
        """Why its loop does not work at present; "" if it does."""

    async def check(self) -> JobFacts:
        """Return the facts about it; raise JobError, with the tail of its log, when it has ended."""

    async def news(self) -> JobFacts:
        """Return the facts after a new poll of the batch system; raise as :meth:`check`."""


async def submit_guarded(
    job: Job, log_directory: str | None, write_down: Callable[[], None], start_guard: Callable[[], None]
) -> None:
    """Submit the first job of a run, with its record and its guard in place before the job exists.

    ``write_down`` updates the record, in a thread, before the submission and after it; ``start_guard`` runs in a
    thread, as soon as there is a record. Raises SubmitError in the batch system's words.
    """
    await tasks.to_thread(write_down)
    await tasks.to_thread(lambda: make_log_folder(log_directory))
    await tasks.to_thread(start_guard)
    await job.submit()
    await tasks.to_thread(write_down)


class BatchJob:
    """The job of a batch system that has the scheduler: submitted here, or before by another process (``recorded``).

    ``spec`` is the request for a job that is still to be submitted; ``say`` takes a line for the user about its state.
    """

    def __init__(
        self,
        system: BatchSystem,
        say: Callable[[str], None],
        recorded: RecordedJob = _NOT_YET,
        *,
        spec: JobSpec | None = None,
        patience: Patience = Patience(),  # frozen
    ) -> None:
        self.recorded, self.spec = recorded, spec
        self._system, self._say, self._said = system, say, ""
        self._submitter = Submitter(system, spec, self._tell, patience, kind="head") if spec else None

    @property
    def script(self) -> str:
        """The job script; "" for a job of another process."""
        return self._system.script(self.spec) if self.spec else ""

    @property
    def id(self) -> str:
        """The batch system's id; "" before the submission."""
        return self.recorded.id

    @property
    def log(self) -> str:
        """Path of its output."""
        return self.recorded.log

    async def submit(self) -> None:
        """Submit it; try transient refusals again, raise SubmitError in the batch system's words for others."""
        if self._submitter is None:
            return
        for note in self._submitter.notes:
            self._tell(note)
        async for jobs in self._submitter.submit(1, ()):
            self.recorded = jobs[0]

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of the job."""
        return self._system.onto(self.id, node, argv)

    async def end(self) -> None:
        """Wait for it to end by itself, then cancel it, even if the answer to its submission was lost.

        Raises SubmitError if it could not be cancelled, or if the batch system does not say whether it exists.
        """
        await self._find_lost()
        if self.id:
            await ending.close(self._system, [self.recorded], _CANCEL_S, self._tell, grace_s=_END_S)

    async def _find_lost(self) -> None:
        unsure = self._submitter.unsure if self._submitter else None
        if not self._submitter or not unsure:
            return
        try:
            for job in await self._submitter.lost(()):
                self.recorded = job
        except SubmitError as e:
            raise SubmitError(
                f"{unsure}. The job may be there all the same ({e}); its guard, a process here, looks for it when this "
                "process has ended",
                evidence=unsure.evidence,
                transient=True,
            ) from e

    def _tell(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._say(f"job {self.id or '-'}: {what}")
