"""Ends of jobs: when a job is over although the batch system has it, and how many have failed in a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hpcgpu.model import JobState
from hpcgpu.model.waits import UNLISTED_S
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_text import format_end, format_missing, format_script_end

# PBS needs 24 s for a qrerun, and over a minute for output that it cannot deliver (state E, 23.06.06). Slurm waits for
# epilogues.
LATE_S = 60.0
# The same if the script has ended by itself: nothing but the delivery of its output is left.
ENDING_S, _TERMINATED = 10.0, 143
# A lost connection is noticed at once; a batch system that does not list a job for so long does not have it.
_MISSING_S = 30.0


def why_over(job: Job, now_s: float, limit_s: float) -> str:
    """Return why a job has ended (at most ``limit_s`` after its script) or never starts; "" while it may exist."""
    status = job.status
    if status is None:
        return ""
    if status.state is JobState.ENDED or (status.state is JobState.STUCK and not job.workers):
        return format_end(job.id, status, job.hosts)
    limit_s = ENDING_S if _ends_by_itself(job) else limit_s
    late = job.script_ended_s is not None and now_s >= job.script_ended_s + limit_s
    if status.state is JobState.RUNNING and not job.workers and late:
        still = f"though the batch system still has it in state {status.native}"
        return f"job {job.id} has ended: {format_script_end(job.script_code)} {limit_s:g} s ago, {still}"
    return ""


def why_ending(job: Job, now_s: float) -> str:
    """Return that a member's script has ended although the job is there; "" while it may start again."""
    if job.script_ended_s is None or now_s < job.script_ended_s + ENDING_S or not _ends_by_itself(job):
        return ""
    return f"{format_script_end(job.script_code)}, {job.status.trouble if job.status else ''}"


def _ends_by_itself(job: Job) -> bool:
    """Tell whether a job is ending since its script has ended, not by a signal, after which it may start again."""
    return bool(job.status and job.status.is_ending) and job.script_code not in (None, _TERMINATED)


def why_missing(job: Job, since_s: float, now_s: float) -> str:
    """Return why to give up a job that is not listed; "" while it may exist.

    ``since_s``: since when its scheduler does not answer; older answers of the batch system do not count.
    """
    limit_s = _MISSING_S if job.was_listed else UNLISTED_S
    if job.is_missing and now_s - max(since_s, job.missing_since_s or 0.0) > limit_s:
        return format_missing(limit_s, f"job {job.id}")
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
