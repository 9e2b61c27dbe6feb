"""Submit jobs in as few submissions as the site allows, as many jobs as a limit admits, and lose none of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.batch_client import look, submit
from hpcgpu.deploy.jobs.job_plan import make_log_folder
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.errors import SubmitError
from hpcgpu.model import JobSpec, Patience
from hpcgpu.plan.jobs.job import HEAD, MEMBER, Job
from hpcgpu.supervise import tasks


async def submit_guarded(run: Run, submit_job: Callable[[], Awaitable[object]]) -> None:
    """Submit the first job of a run, with its record and its guard in place before the job exists.

    Raises SubmitError in the batch system's words.
    """
    await tasks.to_thread(run.save)
    await tasks.to_thread(lambda: make_log_folder(run.document.settings.log_directory))
    await tasks.to_thread(run.start_guard)
    await submit_job()
    run.submitting = False
    await tasks.to_thread(run.save)


class Submitter:
    """Submits one request: for the job with the scheduler (HEAD), or for jobs that join it (MEMBER).

    Each submission of members has an exit file beside ``spec.exit_file``. ``write`` records that a submission is under
    way: jobs may appear after a client that was killed during it. ``say`` takes a line for the user.
    """

    def __init__(
        self,
        system: BatchSystem,
        spec: JobSpec,
        say: Callable[[str], None],
        patience: Patience,
        *,
        write: Callable[[], Awaitable[None]] | None = None,
        role: str = MEMBER,
    ) -> None:
        self._system, self._spec, self._say, self._patience = system, spec, say, patience
        self._write, self._role = write, role
        self._number = 0
        self._asking = False
        self.unsure: SubmitError | None = None  # why an answer was lost, until its jobs are found

    @property
    def unanswered(self) -> bool:
        """True if the answer to a submission is awaited, or was lost."""
        return self._asking or self.unsure is not None

    async def submit_head(self) -> Job:
        """Submit the job with the scheduler; raise SubmitError in the batch system's words."""
        for note in self._system.notes(self._spec):
            self._say(note)
        (job,) = [job async for jobs in self.submit(1, ()) for job in jobs]
        return job

    async def submit(self, count: int, past_ids: Collection[str]) -> AsyncIterator[list[Job]]:
        """Submit ``count`` jobs; yield the jobs of each accepted submission.

        If a limit of this user's admits fewer jobs, groups of descending powers of two are submitted. Raises
        SubmitError if some were refused; the accepted ones have been yielded.
        """
        for part in self._system.split(count):
            try:
                yield await self._submit_array(part, past_ids)
            except SubmitError as e:
                if not e.over_limit:
                    raise
                left = part - 1
                while left:
                    size = 1 << (left.bit_length() - 1)
                    left = size - 1
                    try:
                        accepted = await self._submit_array(size, past_ids)
                    except SubmitError as again:
                        if not again.over_limit:
                            raise
                    else:
                        yield accepted
                raise

    async def lost(self, past_ids: Collection[str]) -> list[Job]:
        """Return existing jobs whose ids were lost in an unanswered submission; [] without one.

        Raises SubmitError if the batch system does not answer now.
        """
        if not self.unsure:
            return []
        ids = await look(self._system, self._spec.name, self._spec.mark, past_ids)
        if ids:
            self.unsure = None
        return [self.lost_job(job_id) for job_id in ids]

    def lost_job(self, job_id: str) -> Job:
        """Return a job whose id was lost."""
        return self._job(job_id, self._spec, self._spec.exit_file if self._role == HEAD else "")

    async def _submit_array(self, count: int, past_ids: Collection[str]) -> list[Job]:
        spec = replace(self._spec, count=count)
        if self._role == MEMBER:
            self._number += 1
            spec = replace(spec, exit_file=f"{spec.exit_file}-{self._number}")
        self._asking = True
        try:
            if self._write:
                await self._write()
            ids = await self._answered(spec, past_ids)
        finally:
            self._asking = False
        files = [spec.exit_file] * len(ids)
        if spec.count > 1:  # of jobs that were found later, while some of the array are missing, the index is unknown
            files = [f"{spec.exit_file}.{i}" if len(ids) == spec.count else "" for i in range(len(ids))]
        return [self._job(job_id, spec, file) for job_id, file in zip(ids, files, strict=True)]

    async def _answered(self, spec: JobSpec, past_ids: Collection[str]) -> Sequence[str]:
        try:
            return await submit(self._system, spec, self._system.script(spec), self._say, self._patience, past_ids)
        except SubmitError as e:
            self.unsure = e if e.unsure else self.unsure
            raise
        except BaseException:
            # a close of the cluster interrupted it: the answer is lost
            self.unsure = SubmitError("the submission was given up before it was answered", unsure=True)
            raise

    def _job(self, job_id: str, spec: JobSpec, exit_file: str) -> Job:
        log = str(Path(self._system.log(spec, job_id)).absolute())
        return Job(id=job_id, role=self._role, log=log, exit_file=exit_file, nodes=spec.nodes)
