"""Submit jobs in as few submissions as the site allows, as many jobs as a limit admits, and lose none of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.batch_client import look, submit
from hpcgpu.deploy.jobs.record import RecordedJob
from hpcgpu.errors import SubmitError
from hpcgpu.model import JobSpec, Patience


class Submitter:
    """Submits one request: for the job with the scheduler, or for the jobs that join it.

    ``kind``: ``head`` is one job, which has the scheduler; ``member`` jobs come and go, each submission with an exit
    file of its own beside ``spec.exit_file``. ``write`` records that a submission is under way: jobs may appear after a
    client that was killed during it. ``say`` takes a line for the user.
    """

    def __init__(
        self,
        system: BatchSystem,
        spec: JobSpec,
        say: Callable[[str], None],
        patience: Patience,
        *,
        write: Callable[[], Awaitable[None]] | None = None,
        kind: str = "member",
    ) -> None:
        self._system, self._spec, self._say, self._patience = system, spec, say, patience
        self._write, self._kind = write, kind
        self._number = 0
        self._asking = False
        self.unsure: SubmitError | None = None  # why an answer was lost, until its jobs are found

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people about the request, before it is made."""
        return tuple(self._system.notes(self._spec))

    @property
    def unanswered(self) -> bool:
        """Whether the answer to a submission is awaited, or was lost."""
        return self._asking or self.unsure is not None

    async def submit(self, count: int, known: Collection[str]) -> AsyncIterator[list[RecordedJob]]:
        """Submit ``count`` jobs; yield the jobs of each accepted submission.

        If a limit of this user's admits fewer jobs, groups of descending powers of two are submitted. Raises
        SubmitError if some were refused; the accepted ones have been yielded.
        """
        for part in self._system.split(count):
            try:
                yield await self._one(part, known)
            except SubmitError as e:
                if not e.over_limit:
                    raise
                left = part - 1
                while left:
                    size = 1 << (left.bit_length() - 1)
                    left = size - 1
                    try:
                        accepted = await self._one(size, known)
                    except SubmitError as again:
                        if not again.over_limit:
                            raise
                    else:
                        yield accepted
                raise

    async def lost(self, known: Collection[str]) -> list[RecordedJob]:
        """Return existing jobs whose ids were lost in an unanswered submission; [] without one.

        Raises SubmitError if the batch system does not answer now.
        """
        if not self.unsure:
            return []
        found = await look(self._system, self._spec.name, self._spec.mark, known)
        if found:
            self.unsure = None
        return [self.record(job_id) for job_id in found]

    def record(self, job_id: str) -> RecordedJob:
        """Make the record of a job whose id was lost."""
        return self._record(job_id, self._spec, self._spec.exit_file if self._kind == "head" else "")

    async def _one(self, count: int, known: Collection[str]) -> list[RecordedJob]:
        spec = replace(self._spec, count=count)
        if self._kind == "member":
            self._number += 1
            spec = replace(spec, exit_file=f"{spec.exit_file}-{self._number}")
        self._asking = True
        try:
            if self._write:
                await self._write()
            ids = await self._answered(spec, known)
        finally:
            self._asking = False
        return [self._record(job_id, spec, file) for job_id, file in zip(ids, _exit_files(spec, ids), strict=True)]

    async def _answered(self, spec: JobSpec, known: Collection[str]) -> Sequence[str]:
        try:
            return await submit(self._system, spec, self._system.script(spec), self._say, self._patience, known)
        except SubmitError as e:
            self.unsure = e if e.unsure else self.unsure
            raise
        except BaseException:
            # a close of the cluster interrupted it: the answer is lost
            self.unsure = SubmitError("the submission was given up before it was answered", unsure=True)
            raise

    def _record(self, job_id: str, spec: JobSpec, exit_file: str) -> RecordedJob:
        log = Path(self._system.log(spec, job_id)).absolute()
        return RecordedJob(id=job_id, log=str(log), exit_file=exit_file, kind=self._kind)


def _exit_files(spec: JobSpec, ids: Sequence[str]) -> list[str]:
    """Return each job's exit file; "" for jobs that were found later if some of the array are missing."""
    if spec.count == 1:
        return [spec.exit_file] * len(ids)
    whole = len(ids) == spec.count
    return [f"{spec.exit_file}.{index}" if whole else "" for index in range(len(ids))]
