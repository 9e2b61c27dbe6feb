"""Decide which jobs to keep, and when to poll them: facts in, actions out, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hpcgpu.model import JobState, Patience
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_end import LATE_S, Failures, why_ending, why_over
from hpcgpu.plan.jobs.job_text import format_missing, format_status

NEVER_S = float("-inf")
# So soon after the end of a job's script the batch system is about to notice it.
_MOMENT_S = 10.0
# The fates of a member job.
GONE, MISSING, GHOST = "gone", "not listed for long", "stuck, or without workers for long"
LEAVING, OUTGOING, ALIVE = "leaving", "near its walltime", "alive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of reconciliation."""

    walltime_s: float | None = None  # asked for; each job has a successor before its time ends
    drain_s: float = 120.0  # so long before its end a job hands over its data; at most a quarter of the walltime
    hold_s: float = 60.0  # adapt cancels no younger job without workers: its position in the queue would be lost
    start_limit_s: float = 300.0  # a job that runs so long without any worker is a ghost
    missing_limit_s: float = 60.0  # a job without workers that is unlisted, or in trouble, for so long is gone
    leave_limit_s: float = 60.0  # a job that was to leave so long ago is cancelled, again if necessary
    # after its script's end, the scheduler's job has ended, whatever the batch system says
    late_limit_s: float = LATE_S
    breaker: int = 3  # submissions stop when so many jobs in a row end before their first worker
    patience: Patience = field(default_factory=Patience)

    def limit_s(self, job: Job) -> float | None:
        """Return a job's walltime: the batch system's answer counts, for its queue or a hook may have changed it."""
        return job.limit_s or self.walltime_s

    def lead_s(self, job: Job) -> float:
        """Return how long before its end a job is retired; its successor is submitted twice as early."""
        return min(self.drain_s, (self.limit_s(job) or 0) / 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts that a decision depends on, while no submission is in progress."""

    now_s: float
    jobs: tuple[Job, ...] = ()
    target: int = 0  # member jobs to keep
    adapting: bool = False  # adapt sets target, and changes it often; False: a user has set it
    held_back_until_s: float = NEVER_S  # no submission before: the last one was refused for now
    failures: Failures = field(default_factory=Failures)  # from the last actions; a new one if a user tries again
    asked_s: float | None = None  # last poll for all these jobs
    answered_s: float | None = None  # last answer of the batch system


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The next actions. No job is in two of these, except that an unlisted job is cancelled and forgotten."""

    submit: int = 0  # number of jobs, in one submission
    cancel: tuple[str, ...] = ()  # sets cancelled_s; a job that cannot be cancelled is not forgotten
    retire: tuple[str, ...] = ()  # sets retired_s: workers hand over their data and leave
    forget: tuple[tuple[str, str], ...] = ()  # gone jobs, each with the reason; remove workers that seem to be left
    lost: tuple[str, ...] = ()  # requeued jobs: remove the workers of the previous run, which are silent
    failures: Failures = field(default_factory=Failures)
    give_up: str = ""  # why submissions have stopped, until a worker registers; empty: they go on
    next_s: float | None = None  # in how many seconds to poll the batch system; None: no need
    wake_s: float | None = None  # in how many seconds to reconcile again without an event; None: no need


def reconcile(facts: Facts, policy: Policy) -> Actions:
    """Decide the next actions; call it after each event, and after ``next_s`` and ``wake_s``.

    A job counts until the batch system says that it has ended, or has not listed it for long. A job that leaves
    (retired, cancelled, or near its walltime) does not count. Missing jobs are submitted at once. Of surplus jobs those
    without workers go first, the youngest before others, then those with the least time left. The job with the
    scheduler is only polled, until it is over.
    """
    heads = [j for j in facts.jobs if j.is_head and not why_over(j, facts.now_s, policy.late_limit_s)]
    facts = replace(facts, jobs=tuple(j for j in facts.jobs if not j.is_head))
    fates = [(job, *_fate(facts, policy, job)) for job in facts.jobs]
    gone, missing, ghosts = ([(j, why) for j, f, why in fates if f == fate] for fate in (GONE, MISSING, GHOST))
    leaving, outgoing, alive = ([j for j, f, _ in fates if f == fate] for fate in (LEAVING, OUTGOING, ALIVE))
    failures = facts.failures.after(facts.jobs, (*gone, *missing, *ghosts), facts.now_s)
    give_up = failures.give_up(policy.breaker)
    cancel, retire = _surplus(facts, policy, alive, outgoing)
    shortage = max(0, facts.target - len(alive))
    held_back = facts.now_s < facts.held_back_until_s
    cancelled = [j for j, _ in (*ghosts, *missing)] + _overdue(facts, policy, leaving) + cancel
    acted = {j.id for j in (*cancelled, *retire)}
    present = [*heads, *(j for j, _ in ghosts), *leaving, *outgoing, *alive]
    wakes = list(_wakes(facts, policy, alive, outgoing, acted))
    if shortage and held_back and not give_up:
        wakes.append(facts.held_back_until_s)
    return Actions(
        submit=0 if give_up or held_back else shortage,
        cancel=tuple(j.id for j in cancelled),
        retire=tuple(j.id for j in retire),
        forget=tuple((j.id, why) for j, why in (*gone, *missing)),
        lost=tuple(j.id for j in present if not j.is_head and j.workers and not j.heard and j.state in WAITING),
        failures=failures,
        give_up=give_up,
        next_s=poll_in_s(facts.now_s, facts.asked_s, present, acted, policy.patience),
        wake_s=max(0.0, min(wakes) - facts.now_s) if wakes else None,
    )


def _fate(facts: Facts, policy: Policy, job: Job) -> tuple[str, str]:
    """Return the fate of a member job, and the reason why it is given up; "" if it is not."""
    state, heard = job.state, job.heard
    if job.status and state is JobState.ENDED:
        return GONE, format_status(job.status) or "ended"
    unlisted_s = policy.missing_limit_s if job.was_listed else policy.patience.unlisted_s
    if not heard and _answered(facts, job.missing_since_s, unlisted_s):
        return MISSING, format_missing(unlisted_s)
    if job.leaving:
        return LEAVING, ""
    if job.status and state is JobState.STUCK and not job.workers:
        return GHOST, format_status(job.status)
    if not heard and (why := why_ending(job, facts.now_s)):
        return GHOST, why
    if state is JobState.RUNNING and _answered(facts, job.alone_since_s, policy.start_limit_s):
        return GHOST, f"ran for {policy.start_limit_s:g} s without a worker"
    # lasting trouble of a running job without workers, or of its node
    trouble = job.status.trouble if job.status and state is JobState.RUNNING and not heard else ""
    if trouble and _answered(facts, _lost_s(job), policy.missing_limit_s):
        return GHOST, trouble
    return OUTGOING if facts.now_s >= _end_s(job, policy) - 2 * policy.lead_s(job) else ALIVE, ""


def _answered(facts: Facts, since_s: float | None, limit_s: float) -> bool:
    """Tell whether answers of the batch system span the limit: without an answer nothing is proven."""
    return since_s is not None and facts.answered_s is not None and facts.answered_s - since_s >= limit_s


def _end_s(job: Job, policy: Policy) -> float:
    """Return when the job reaches its walltime. A suspended job cannot hand over, and its time may not run."""
    limit_s = policy.limit_s(job)
    if limit_s is None or job.started_s is None or job.state is JobState.SUSPENDED:
        return float("inf")
    return job.started_s + limit_s


def _surplus(
    facts: Facts, policy: Policy, alive: Sequence[Job], outgoing: Sequence[Job]
) -> tuple[list[Job], list[Job]]:
    """Return the jobs to cancel and the jobs to retire: the surplus, and jobs near their walltime."""
    cancel, retire = [], []
    surplus = len(alive) - facts.target
    for job in _dispensable(alive, policy)[: max(0, surplus)]:
        if job.workers:
            retire.append(job)
        elif not _is_held(facts, policy, job):
            cancel.append(job)
    # A job near its end is kept until the jobs that stay have all their workers.
    full = sum(1 for j in alive if j.workers and j.workers >= j.expected)
    for job in outgoing:
        if full >= facts.target or facts.now_s >= _end_s(job, policy) - policy.lead_s(job):
            # Workers leave by themselves at the batch system's warning; their job is about to end then.
            (cancel if job.first_worker_s is None else retire).append(job)
    return cancel, retire


def _dispensable(alive: Sequence[Job], policy: Policy) -> list[Job]:
    """Sort the jobs, the most dispensable first."""
    youngest = sorted(reversed(alive), key=lambda j: -j.submitted_s)

    def rank(job: Job) -> tuple[int, float]:
        if not job.workers:
            return (0, 0.0) if job.started_s is None else (1, 0.0)
        return 2, _end_s(job, policy)

    return sorted(youngest, key=rank)


def _is_held(facts: Facts, policy: Policy, job: Job) -> bool:
    return facts.adapting and facts.now_s < job.submitted_s + policy.hold_s


def _overdue(facts: Facts, policy: Policy, leaving: Sequence[Job]) -> list[Job]:
    """Return the jobs that should have been gone long ago, by the batch system's last answer."""
    out = []
    for job in leaving:
        since_s = job.cancelled_s
        if since_s is None and job.retired_s is not None:
            since_s = job.retired_s + policy.drain_s if job.alone_since_s is None else job.alone_since_s
        if _answered(facts, since_s, policy.leave_limit_s):
            out.append(job)
    return out


def _wakes(
    facts: Facts, policy: Policy, alive: Sequence[Job], outgoing: Sequence[Job], acted: set[str]
) -> Iterator[float]:
    """Yield the times at which something is due that no event and no answer announces."""
    for job in outgoing:
        if job.id not in acted:
            yield _end_s(job, policy) - policy.lead_s(job)
    for job in alive:
        if job.id not in acted and (end_s := _end_s(job, policy)) < float("inf"):
            yield end_s - 2 * policy.lead_s(job)
    surplus = _dispensable(alive, policy)[: max(0, len(alive) - facts.target)]
    yield from (j.submitted_s + policy.hold_s for j in surplus if not j.workers and _is_held(facts, policy, j))


def poll_in_s(
    now_s: float, asked_s: float | None, jobs: Sequence[Job], acted: Collection[str], patience: Patience
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
    interval_s = min(patience.longest_s, max(patience.ask_s, (asked_s - changed_s) / patience.growth))
    for job in unsettled:
        has_just_ended = job.script_ended_s is not None and now_s - job.script_ended_s < _MOMENT_S
        lost_s = _lost_s(job)
        if has_just_ended or (lost_s is not None and lost_s > asked_s and not job.leaving):
            interval_s = patience.news_s
    return max(0.0, asked_s + interval_s - now_s)


def _lost_s(job: Job) -> float | None:
    return job.alone_since_s if job.silent_since_s is None else job.silent_since_s


def _is_unsettled(job: Job) -> bool:
    if not job.heard or job.unasked or job.leaving or job.state is JobState.SUSPENDED:
        return True
    return job.is_head and job.state is not JobState.RUNNING


def _changed_s(job: Job) -> float:
    life = (job.submitted_s, job.started_s, job.retired_s, job.cancelled_s)
    absence = (job.alone_since_s, job.silent_since_s, job.missing_since_s)
    return max(s for s in (*life, *absence) if s is not None)
