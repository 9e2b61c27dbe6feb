"""What is to be done so that as many jobs are there as are wanted: facts in, actions out, no clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hpcgpu.model import JobState, Patience
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.phase import words
from hpcgpu.plan.jobs.polling import ask_in_s

_NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits, in seconds.

    Attributes
    ----------
    walltime_s : float or None
        Time limit of a job; with it every job is followed by a successor before its end.
    drain_s : float
        How long before its end a job hands over its data; at most a quarter of the walltime.
    hold_s : float
        A job without workers that is younger is not cancelled by ``adapt``: its place in the queue would be lost.
    start_limit_s : float
        A job that runs for so long without any worker is a ghost.
    missing_limit_s : float
        A job without workers that the batch system has not listed for so long, or in trouble, is gone.
    leave_limit_s : float
        A job that is still there so long after it was to be gone is cancelled, again if need be.
    breaker : int
        So many jobs in a row that end before their first worker stop all submissions.
    patience : Patience
        With the batch system.

    """

    walltime_s: float | None = None
    drain_s: float = 120.0
    hold_s: float = 60.0
    start_limit_s: float = 300.0
    missing_limit_s: float = 60.0
    leave_limit_s: float = 60.0
    breaker: int = 3
    patience: Patience = field(default_factory=Patience)

    @property
    def lead_s(self) -> float:
        """How long before its end a job is retired; its successor is submitted twice as long before."""
        return min(self.drain_s, (self.walltime_s or 0) / 4)


@dataclass(frozen=True, slots=True)
class Failures:
    """Jobs in a row that ended before their first worker: how many, when the last was seen, its end in words, and it.

    Its log is the one to show, whatever else is forgotten at the same time.
    """

    in_a_row: int = 0
    last_s: float = _NEVER_S
    last: str = ""
    last_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known.

    Attributes
    ----------
    wanted : int
        Jobs.
    submitting : int
        Jobs of submissions under way, which have no id yet.
    adapting : bool
        ``wanted`` comes from ``adapt``, which changes its mind often; otherwise somebody said so.
    asked_s, answered_s : float or None
        When the batch system was last asked about all these jobs, and when it last answered.
    held_back_until_s : float
        No submission before: the last one was refused for now.
    failures : Failures
        As the last actions had it; a fresh one when somebody wants to try again.

    """

    now_s: float
    wanted: int
    jobs: tuple[JobFacts, ...] = ()
    submitting: int = 0
    adapting: bool = False
    asked_s: float | None = None
    answered_s: float | None = None
    held_back_until_s: float = _NEVER_S
    failures: Failures = Failures()


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What to do. Nothing is in two of these, but that a job which is not listed is cancelled and forgotten.

    Attributes
    ----------
    submit : int
        Jobs, in one submission.
    cancel : tuple of str
        To be cancelled; from then on they have ``cancelled_s``. Who cannot be cancelled is not forgotten.
    retire : tuple of str
        Their workers are to hand over their data and leave; from then on they have ``retired_s``.
    forget : tuple of (str, str)
        Jobs that are gone, and why. Workers that seem to be left of them are to be removed.
    lost : tuple of str
        Jobs that are to start again: the workers of their last life say nothing, and are to be removed.
    give_up : str
        Why nothing is submitted any more; empty when all is well, which it is again once a worker comes.
    next_s : float or None
        In how many seconds to ask the batch system; None: there is nothing to ask.
    wake_s : float or None
        In how many seconds to reconcile again though nothing has happened; None: no need.

    """

    submit: int = 0
    cancel: tuple[str, ...] = ()
    retire: tuple[str, ...] = ()
    forget: tuple[tuple[str, str], ...] = ()
    lost: tuple[str, ...] = ()
    failures: Failures = Failures()
    give_up: str = ""
    next_s: float | None = None
    wake_s: float | None = None


@dataclass(slots=True, eq=False)
class _Sorted:
    """The jobs by what is to be said of them."""

    gone: list[tuple[JobFacts, str]] = field(default_factory=list)
    missing: list[tuple[JobFacts, str]] = field(default_factory=list)
    ghosts: list[tuple[JobFacts, str]] = field(default_factory=list)
    leaving: list[JobFacts] = field(default_factory=list)
    outgoing: list[JobFacts] = field(default_factory=list)
    alive: list[JobFacts] = field(default_factory=list)


def reconcile(facts: Facts, policy: Policy) -> Actions:
    """Return what is to be done now; to be called after each event, and after ``next_s`` and ``wake_s``.

    A job counts until the batch system says that it has ended, or that it does not know it for long;
    one that leaves (retired, cancelled, or near its walltime) does not. What is missing then is
    submitted at once, what is too much goes: first jobs without workers, the youngest first, then those
    with the least time left.
    """
    jobs = _sort(facts, policy)
    failures = _failures(facts, jobs)
    give_up = _give_up(failures, policy)
    cancel, retire = _surplus(facts, policy, jobs)
    hole = max(0, facts.wanted - len(jobs.alive) - facts.submitting)
    held_back = facts.now_s < facts.held_back_until_s
    cancelled = [j for j, _ in (*jobs.ghosts, *jobs.missing)] + _overdue(facts, policy, jobs.leaving) + cancel
    acted = {j.id for j in (*cancelled, *retire)}
    there = [*(j for j, _ in jobs.ghosts), *jobs.leaving, *jobs.outgoing, *jobs.alive]
    wakes = list(_wakes(facts, policy, jobs, acted))
    if hole and held_back and not give_up:
        wakes.append(facts.held_back_until_s)
    return Actions(
        submit=0 if give_up or held_back else hole,
        cancel=tuple(j.id for j in cancelled),
        retire=tuple(j.id for j in retire),
        forget=tuple((j.id, why) for j, why in (*jobs.gone, *jobs.missing)),
        lost=tuple(j.id for j in there if j.workers and not j.heard and j.state in WAITING),
        failures=failures,
        give_up=give_up,
        next_s=ask_in_s(facts.now_s, facts.asked_s, there, acted, policy.patience),
        wake_s=max(0.0, min(wakes) - facts.now_s) if wakes else None,
    )


def _sort(facts: Facts, policy: Policy) -> _Sorted:
    out = _Sorted()
    for job in facts.jobs:
        if job.status and job.state is JobState.ENDED:
            out.gone.append((job, words(job.status) or "ended"))
        elif not job.heard and _answered(facts, job.missing_since_s, policy.missing_limit_s):
            out.missing.append((job, f"not listed any more since {policy.missing_limit_s:g} s"))
        elif job.leaving:
            out.leaving.append(job)
        elif job.status and job.state is JobState.STUCK and not job.workers:
            out.ghosts.append((job, words(job.status)))
        elif job.state is JobState.RUNNING and _answered(facts, job.alone_since_s, policy.start_limit_s):
            out.ghosts.append((job, f"ran for {policy.start_limit_s:g} s without a worker"))
        elif (why := _in_trouble(facts, policy, job)) and not job.heard:
            out.ghosts.append((job, why))
        elif facts.now_s >= _end_s(job, policy) - 2 * policy.lead_s:
            out.outgoing.append(job)
        else:
            out.alive.append(job)
    return out


def _in_trouble(facts: Facts, policy: Policy, job: JobFacts) -> str:
    """Return what is wrong with it or its node, once it has been for long: it is said to run, and no worker comes."""
    since_s = job.alone_since_s if job.silent_since_s is None else job.silent_since_s
    trouble = job.status.trouble if job.status and job.state is JobState.RUNNING else ""
    return trouble if _answered(facts, since_s, policy.missing_limit_s) else ""


def _answered(facts: Facts, since_s: float | None, limit_s: float) -> bool:
    """Tell whether the batch system said so at both ends of a long time: no answer proves nothing."""
    return since_s is not None and facts.answered_s is not None and facts.answered_s - since_s >= limit_s


def _end_s(job: JobFacts, policy: Policy) -> float:
    """Return when the job ends by its walltime. A suspended one cannot hand over, and its time may not run."""
    if policy.walltime_s is None or job.started_s is None or job.state is JobState.SUSPENDED:
        return float("inf")
    return job.started_s + policy.walltime_s


def _failures(facts: Facts, jobs: _Sorted) -> Failures:
    """Count in the order in which it was learned: workers as they came, ends with the last answer."""
    failures = facts.failures
    if any(j.first_worker_s is not None and j.first_worker_s > failures.last_s for j in facts.jobs):
        failures = replace(failures, in_a_row=0)
    ends = (*jobs.gone, *jobs.missing, *jobs.ghosts)
    failed = [(j, why) for j, why in ends if j.first_worker_s is None and not j.leaving]
    if not failed:
        return failures
    job, why = failed[-1]
    return Failures(failures.in_a_row + len(failed), facts.now_s, f"job {job.id}: {why}", job.id)


def _give_up(failures: Failures, policy: Policy) -> str:
    if failures.in_a_row < policy.breaker:
        return ""
    return f"{failures.in_a_row} jobs in a row ended before their first worker; the last was {failures.last}"


def _surplus(facts: Facts, policy: Policy, jobs: _Sorted) -> tuple[list[JobFacts], list[JobFacts]]:
    """Return the jobs to cancel and to retire: the surplus, and those whose time is over."""
    cancel, retire = [], []
    surplus = len(jobs.alive) - facts.wanted
    for job in _dispensable(jobs.alive, policy)[: max(0, surplus)]:
        if job.workers:
            retire.append(job)
        elif not _is_held(facts, policy, job):
            cancel.append(job)
    # A job near its end works on until those that are to stay have all their workers.
    full = sum(1 for j in jobs.alive if j.workers and j.workers >= j.expected)
    for job in jobs.outgoing:
        if full >= facts.wanted or facts.now_s >= _end_s(job, policy) - policy.lead_s:
            # Workers leave by themselves at the batch system's warning, and their job is about to end then.
            (cancel if job.first_worker_s is None else retire).append(job)
    return cancel, retire


def _dispensable(alive: Sequence[JobFacts], policy: Policy) -> list[JobFacts]:
    """Return the jobs in the order in which they may go."""
    youngest = sorted(reversed(alive), key=lambda j: -j.submitted_s)

    def place(job: JobFacts) -> tuple[int, float]:
        if not job.workers:
            return (0, 0.0) if job.started_s is None else (1, 0.0)
        return 2, _end_s(job, policy)

    return sorted(youngest, key=place)


def _is_held(facts: Facts, policy: Policy, job: JobFacts) -> bool:
    return facts.adapting and facts.now_s < job.submitted_s + policy.hold_s


def _overdue(facts: Facts, policy: Policy, leaving: Sequence[JobFacts]) -> list[JobFacts]:
    """Return the jobs that were to be gone long ago, by the batch system's last answer."""
    out = []
    for job in leaving:
        since_s = job.cancelled_s
        if since_s is None and job.retired_s is not None:
            since_s = job.retired_s + policy.drain_s if job.alone_since_s is None else job.alone_since_s
        if _answered(facts, since_s, policy.leave_limit_s):
            out.append(job)
    return out


def _wakes(facts: Facts, policy: Policy, jobs: _Sorted, acted: set[str]) -> Iterator[float]:
    """Yield when something is to be done that no event and no answer tells."""
    for job in jobs.outgoing:
        if job.id not in acted:
            yield _end_s(job, policy) - policy.lead_s
    for job in jobs.alive:
        if job.id not in acted and (end_s := _end_s(job, policy)) < float("inf"):
            yield end_s - 2 * policy.lead_s
    surplus = _dispensable(jobs.alive, policy)[: max(0, len(jobs.alive) - facts.wanted)]
    yield from (j.submitted_s + policy.hold_s for j in surplus if not j.workers and _is_held(facts, policy, j))
