"""Decide which jobs to request, when to poll them, and how to keep their number: facts in, actions out, no clock.

Together: what is requested, how many, and what no queue has are answers about one request.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from hpcgpu.errors import ConfigError, opt, plain
from hpcgpu.model import JobSpec, JobState, Offer, Patience, Settings
from hpcgpu.model.allocation import parse_simulated
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_end import LATE_S, Failures, why_ending, why_over
from hpcgpu.plan.jobs.job_text import format_missing, format_status
from hpcgpu.units import format_bytes, format_duration

# Directives for CPUs, or for whole nodes, and for GPUs.
_CPU_DIRECTIVE = r"exclusive|excl\b|cpus|ncpus|-c\b|\bselect="
_GPU_DIRECTIVE = r"--gres=gpu|--gpus|-G\b|ngpus="
NEVER_S = float("-inf")
# So soon after the end of a job's script the batch system is about to notice it.
_MOMENT_S = 10.0
# The fates of a member job.
GONE, MISSING, GHOST = "gone", "not listed for long", "stuck, or without workers for long"
LEAVING, OUTGOING, ALIVE = "leaving", "near its walltime", "alive"


def workers_per_node(settings: Settings) -> int:
    """Return the number of workers of each node; raise ConfigError if the number of GPUs is not given."""
    return gpus_per_node(settings) * settings.workers_per_gpu + settings.cpu_workers


def first_workers(settings: Settings) -> int:
    """Return the workers of the job that has the scheduler; 0 if the submitting process has the scheduler."""
    here = settings.shape == "elastic" and settings.scheduler == "here"
    return 0 if here else settings.nodes * workers_per_node(settings)


def plan_request(settings: Settings, argv: tuple[str, ...]) -> JobSpec:
    """Request a gang: one job, one rank per GPU (or per node) and the scheduler's beside them.

    ``settings`` are checked and have a site's number of GPUs; ``argv`` starts the ranks with the run document. Raises
    ConfigError for a missing number of GPUs.
    """
    count = gpus_per_node(settings)
    _check_cores(settings, count)
    tasks = count if count and settings.ranks_per(settings.nodes) == "gpu" else 1
    of_gpus, beside = settings.cores_per_gpu, settings.cpu_workers * settings.nthreads  # cores of the CPU workers
    return JobSpec(
        name=settings.job_name,
        argv=argv,
        nodes=settings.nodes,
        tasks_per_node=tasks,
        cpus_per_task=None if of_gpus is None and count else (of_gpus or 0) * count // tasks + -(-beside // tasks),
        gpus_per_node=0 if settings.gpus else count,
        memory_per_node_bytes=settings.memory_bytes,
        walltime_s=settings.walltime_s,
        warn_s=int(settings.warning_s),
        requeue=settings.requeue,
        queue=settings.queue,
        account=settings.account,
        prologue=settings.job_script_prologue,
        extra_directives=settings.job_extra_directives,
        skipped_directives=settings.job_directives_skip,
        log_directory=settings.log_directory,
    )


def _check_cores(settings: Settings, count: int) -> None:
    """Refuse a number of cores to bind to of which the job would get fewer: dask-jobqueue's cores= requests them."""
    cores, each = settings.cores, settings.cores_per_gpu
    elsewhere = settings.site or any(re.search(_CPU_DIRECTIVE, d) for d in settings.job_extra_directives)
    if not isinstance(cores, int) or (each is None and elsewhere) or not count:
        return
    needed = cores * settings.workers_per_gpu
    if each is None or needed > each:
        has = f"a GPU has {opt('cores_per_gpu', each)}" if each else "no core is requested from the batch system"
        raise ConfigError(
            f"{settings.opt('cores')} binds each worker to {cores} cores, but {has}; to request {cores} cores of a "
            f"node give {opt('cores_per_gpu', max(1, cores // count))} instead; to bind each worker to {cores} cores "
            f"give {opt('cores_per_gpu', needed)} too"
        )


def gpus_per_node(settings: Settings) -> int:
    """Return the GPUs of each node; simulated ones are not requested of the batch system."""
    if settings.gpus:
        return parse_simulated(settings.gpus).per_node
    if (count := settings.gpus_per_node) is None:
        gres = next((d for d in settings.job_extra_directives if re.search(_GPU_DIRECTIVE, d)), "")
        if gres:
            number = re.search(r"\d+$", gres)
            raise ConfigError(
                f"instead of {gres} (set by {settings.where('job_extra_directives')}) give "
                f"{opt('gpus_per_node', int(number[0]) if number else 4)}: the number of workers follows from it"
            )
        raise ConfigError(
            f"the number of GPUs of each node is not given: add {opt('gpus_per_node', 4)}, or {opt('site')} for "
            f"a known machine, or {opt('gpus', 'sim:4')} to try without GPUs"
        )
    return count


def shortfalls(spec: JobSpec, offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return what the job requests and none of the queues has, in users' option names; () if one may run it."""
    queues = {offer.queue: [o for o in offers if o.queue == offer.queue] for offer in offers}
    return min((tuple(map(plain, _of_queue(spec, kinds))) for kinds in queues.values()), key=len, default=())


def _of_queue(spec: JobSpec, kinds: Sequence[Offer]) -> Iterator[str]:
    queue = f"queue {kinds[0].queue}"
    longest_s, most, nodes = kinds[0].walltime_s, kinds[0].most_nodes, sum(kind.nodes for kind in kinds)
    if spec.walltime_s and longest_s is not None and -(-spec.walltime_s // 60) > longest_s / 60:
        walltime = opt("walltime", format_duration(spec.walltime_s))
        yield f"{walltime}, but {queue} has a limit of {format_duration(longest_s)}"
    if most is not None and spec.nodes > most:
        yield f"{opt('nodes', spec.nodes)}, but {queue} gives a job {most} at most"
    elif spec.nodes > nodes:
        yield f"{opt('nodes', spec.nodes)}, but {queue} has {nodes}"
    too_much = list(_of_each_node(spec, kinds, queue))
    yield from too_much
    fits = sum(kind.nodes for kind in kinds if not any(_of_each_node(spec, [kind], queue)))
    if not too_much and fits < spec.nodes <= nodes:
        fitting = f"only {fits} of the {nodes} nodes of {queue} have the requested resources"
        yield f"{opt('nodes', spec.nodes)}, but {fitting}"


def _of_each_node(spec: JobSpec, kinds: Sequence[Offer], queue: str) -> Iterator[str]:
    gpus = _most([kind.gpus for kind in kinds])
    if gpus is not None and spec.gpus_per_node > gpus:
        yield f"{opt('gpus_per_node', spec.gpus_per_node)}, but the nodes of {queue} have {gpus} at most"
    cpus, cores = _most([kind.cpus for kind in kinds]), spec.tasks_per_node * (spec.cpus_per_task or 1)
    if cpus is not None and cores > cpus:
        each = opt("cores_per_gpu")
        yield f"{cores} cores of each node ({each} of each GPU), but the nodes of {queue} have {cpus} at most"
    memory, size = _most([kind.memory_bytes for kind in kinds]), spec.memory_per_node_bytes
    if memory is not None and size is not None and size > memory:
        yield f"{opt('memory', format_bytes(size))}, but the nodes of {queue} have {format_bytes(memory)} at most"


def _most(counts: Sequence[int | None]) -> int | None:
    """Return the largest count; None if one is unknown."""
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


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
    if job.status and job.state is JobState.ENDED:
        return GONE, format_status(job.status) or "ended"
    unlisted_s = policy.missing_limit_s if job.was_listed else policy.patience.unlisted_s
    if not job.heard and _answered(facts, job.missing_since_s, unlisted_s):
        return MISSING, format_missing(unlisted_s)
    if job.leaving:
        return LEAVING, ""
    if job.status and job.state is JobState.STUCK and not job.workers:
        return GHOST, format_status(job.status)
    if not job.heard and (why := why_ending(job, facts.now_s)):
        return GHOST, why
    if job.state is JobState.RUNNING and _answered(facts, job.alone_since_s, policy.start_limit_s):
        return GHOST, f"ran for {policy.start_limit_s:g} s without a worker"
    # lasting trouble of a running job without workers, or of its node
    trouble = job.status.trouble if job.status and job.state is JobState.RUNNING and not job.heard else ""
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
