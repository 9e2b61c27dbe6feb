"""The present jobs of a cluster, and the last few that are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from hpcgpu.deploy.jobs.record import with_exit_code
from hpcgpu.model import JobState, JobStatus
from hpcgpu.plan.jobs.job import HEAD, Job
from hpcgpu.plan.jobs.phase import SILENT

_SILENT = JobStatus(JobState.UNKNOWN, "", SILENT)
# Enough for people; a cluster of weeks has thousands.
_GONE = 5


@dataclass(frozen=True, slots=True)
class JobWorkers:
    """The registered workers of one job."""

    addresses: tuple[str, ...] = ()
    restarts: int = 0  # of their job, as their names show
    silent: bool = False  # no recent heartbeat of any of them


NO_WORKERS = JobWorkers()


class JobTable:
    """The jobs in the order of their submission: the one with the scheduler, and its members, which come and go."""

    def __init__(self, expected: int) -> None:
        self.expected = expected  # workers of each member
        # Each job is replaced as a whole: the user's thread reads while the event loop's thread writes.
        self._jobs: dict[str, Job] = {}
        self._forgotten: dict[str, int] = {}
        self.gone: deque[Job] = deque(maxlen=_GONE)  # the last few that ended unasked, the newest first

    @property
    def head(self) -> Job | None:
        """The job with the scheduler; None if the scheduler is on this machine."""
        return next((job for job in self.jobs if job.is_head), None)

    @property
    def ids(self) -> list[str]:
        """The batch system's ids."""
        return list(self._jobs)

    @property
    def past_ids(self) -> set[str]:
        """The ids of all jobs that have ever been submitted."""
        return {*self._jobs, *self._forgotten}

    @property
    def members(self) -> tuple[Job, ...]:
        """The present jobs that come and go."""
        return tuple(job for job in self.jobs if not job.is_head)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The present jobs."""
        return tuple(self._jobs.values())

    def add_head(self, job: Job, expected: int, now_s: float) -> None:
        """Add the job with the scheduler, which is never replaced."""
        self._put(replace(job, role=HEAD, submitted_s=now_s, expected=expected))

    def add(self, jobs: Sequence[Job], now_s: float) -> None:
        """Add member jobs that have been submitted."""
        for job in jobs:
            self._put(replace(job, submitted_s=now_s, expected=self.expected))

    def follow(self, members: Sequence[Job], gone: Sequence[Job], now_s: float) -> None:
        """Take over exactly the members and gone jobs that another object has recorded."""
        self.gone = deque(gone, maxlen=_GONE)
        for job_id in {job.id for job in self.members} - {job.id for job in members}:
            self.forget(job_id)
        self.add([job for job in members if job.id not in self._jobs], now_s)

    def unknown(self, present: Mapping[str, JobWorkers]) -> list[str]:
        """Return jobs with workers that are not in the table: an answer of sbatch's was lost.

        Remaining workers of an ended job do not count, unless it was started again.
        """
        return [
            job_id
            for job_id, workers in present.items()
            if job_id not in self._jobs and workers.restarts > self._forgotten.get(job_id, -1)
        ]

    def with_exit_codes(self, listed: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
        """Add the exit codes that the jobs' scripts have left to the batch system's answer; reads files."""
        jobs = dict(self._jobs)
        return {i: with_exit_code(jobs[i], status) if i in jobs else status for i, status in listed.items()}

    def listed(self, ids: Sequence[str], listed: Mapping[str, JobStatus], now_s: float) -> None:
        """Apply the batch system's answer about the polled jobs."""
        for job_id in ids:
            if job := self._jobs.get(job_id):
                self._put(job.listed(listed.get(job_id), now_s))

    def unanswered(self, now_s: float) -> None:
        """Mark the scheduler's job as unknown if no worker is heard: the batch system does not answer."""
        if (head := self.head) and not head.heard:
            self._put(head.listed(_SILENT, now_s))

    def left(self, has_left: bool, code: int | None, now_s: float) -> bool:
        """Record whether the script of the scheduler's job has ended; return True if that changed."""
        before = self.head
        assert before
        self._put(before.left(has_left, code, now_s))
        return (before.left_s is not None) != has_left

    def registered(self, present: Mapping[str, JobWorkers], now_s: float) -> None:
        """Apply the registered workers."""
        for job in self.jobs:
            workers = present.get(job.id, NO_WORKERS)
            self._put(job.registered(len(workers.addresses), now_s, workers.restarts, silent=workers.silent))

    def cancelled(self, job_ids: Sequence[str], now_s: float) -> None:
        """Record that jobs have been cancelled."""
        for job_id in job_ids:
            if job := self._jobs.get(job_id):
                self._put(replace(job, cancelled_s=now_s))

    def retired(self, job_id: str, now_s: float) -> None:
        """Record that a job has been asked to leave."""
        self._put(replace(self._jobs[job_id], retired_s=now_s))

    def ended(self, job_id: str, why: str, at: datetime) -> None:
        """Remove a job that has ended, and keep it among the gone ones if its end was not asked for."""
        job = self.forget(job_id)
        if not job.leaving:
            self.gone.appendleft(job.gone(why, at))

    def forget(self, job_id: str) -> Job:
        """Remove and return a job that is gone."""
        job = self._jobs.pop(job_id)
        self._forgotten[job_id] = job.restarts
        return job

    def _put(self, job: Job) -> None:
        self._jobs[job.id] = job
