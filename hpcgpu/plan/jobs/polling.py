"""Decide when to poll the batch system: soon after a change, seldom later, never without need."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpcgpu.model import JobState, Patience
from hpcgpu.plan.jobs.job import Job

# So soon after the end of a job's script the batch system is about to notice it.
_MOMENT_S = 10.0
# The longest interval between two polls, and the ratio of the time since the last change to the interval.
_LONGEST_S, _RATIO = 60.0, 6.0


def poll_in_s(
    now_s: float,
    asked_s: float | None,
    jobs: Sequence[Job],
    acted: Collection[str] = (),
    patience: Patience = Patience(),  # frozen
) -> float | None:
    """Return in how many seconds to poll for these jobs; None if their workers show everything.

    ``asked_s``: the last poll. ``acted``: ids of jobs that are being retired or cancelled. Poll once for a started job,
    when its nodes are known: after a requeue they may not be. The job with the scheduler is not polled at once.
    """
    unsettled = [j for j in jobs if j.id in acted or _is_unsettled(j)]
    if not unsettled:
        return None
    if asked_s is None:
        return max(0.0, min(j.submitted_s + (patience.news_s if j.is_head else 0.0) for j in unsettled) - now_s)
    changed_s = max(now_s if j.id in acted else _changed_s(j) for j in unsettled)
    interval_s = min(_LONGEST_S, max(patience.ask_s, (asked_s - changed_s) / _RATIO))
    for job in unsettled:
        has_just_ended = job.left_s is not None and now_s - job.left_s < _MOMENT_S
        lost_s = job.alone_since_s if job.silent_since_s is None else job.silent_since_s
        if has_just_ended or (lost_s is not None and lost_s > asked_s and not job.leaving):
            interval_s = patience.news_s
    return max(0.0, asked_s + interval_s - now_s)


def _is_unsettled(job: Job) -> bool:
    if not job.heard or job.unasked or job.leaving or job.state is JobState.SUSPENDED:
        return True
    return job.is_head and job.state is not JobState.RUNNING


def _changed_s(job: Job) -> float:
    life = (job.submitted_s, job.started_s, job.retired_s, job.cancelled_s)
    absence = (job.alone_since_s, job.silent_since_s, job.missing_since_s)
    return max(s for s in (*life, *absence) if s is not None)
