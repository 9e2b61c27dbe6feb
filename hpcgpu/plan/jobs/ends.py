"""Decide when a job has ended, and count failures in a row. The scheduler's job is never replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpcgpu.model import JobState
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.phase import format_end, format_missing, format_script_end

# PBS needs 24 s for a qrerun, and over a minute for output that it cannot deliver (state E, 23.06.06). Slurm waits for
# epilogues.
LATE_S = 60.0
# A lost connection is noticed at once; a batch system that does not list a job for so long does not have it.
_MISSING_S = 30.0


def why_over(job: Job, now_s: float, limit_s: float) -> str:
    """Return why a job has ended or will never start; "" while it may exist.

    ``limit_s`` after the end of its script it has ended, even if the batch system still lists it.
    """
    status = job.status
    if status is None:
        return ""
    if status.state is JobState.ENDED or (status.state is JobState.STUCK and not job.workers):
        return format_end(job.id, status)
    late = job.left_s is not None and now_s >= job.left_s + limit_s
    if status.state is JobState.RUNNING and not job.workers and late:
        still = f"though the batch system still has it in state {status.native}"
        return f"job {job.id} has ended: {format_script_end(job.left_code)} {limit_s:g} s ago, {still}"
    return ""


def why_missing(job: Job, since_s: float, now_s: float) -> str:
    """Return why to give up a job whose scheduler does not answer: it is not listed; "" while it may exist.

    ``since_s``: since when its scheduler does not answer; older answers of the batch system do not count.
    """
    if job.is_missing and now_s - max(since_s, job.missing_since_s or 0.0) > _MISSING_S:
        return format_missing(_MISSING_S, f"job {job.id}")
    return ""


def may_answer(job: Job) -> bool:
    """Tell whether the scheduler of a job may answer."""
    return job.state in (JobState.RUNNING, JobState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Failures:
    """Jobs in a row that ended before their first worker. Errors show the log of the last job."""

    in_a_row: int = 0
    last_s: float = float("-inf")  # when it ended, on the clock of jobs
    last: str = ""  # the job and its end, for people
    last_id: str = ""

    def after(self, jobs: Iterable[Job], ends: Sequence[tuple[Job, str]], now_s: float) -> Failures:
        """Count failures in the order of events: workers as they registered, ``ends`` with the last answer."""
        failures = self
        if any(j.first_worker_s is not None and j.first_worker_s > failures.last_s for j in jobs):
            failures = replace(failures, in_a_row=0)
        failed = [(j, why) for j, why in ends if j.first_worker_s is None and not j.leaving]
        if not failed:
            return failures
        job, why = failed[-1]
        return Failures(failures.in_a_row + len(failed), now_s, f"job {job.id}: {why}", job.id)

    def give_up(self, breaker: int) -> str:
        """Return why submissions stop; "" while fewer than ``breaker`` jobs have failed."""
        if self.in_a_row < breaker:
            return ""
        return f"{self.in_a_row} jobs in a row ended before their first worker; the last was {self.last}"
