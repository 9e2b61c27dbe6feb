"""Decide about jobs: one job, its end, its phase and its text for people."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any, Self

from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import UNLISTED_S, WAITING
from hpcgpu.units import counted

# The part after the last hyphen is ours; a PBS server's name may contain hyphens, digits and any letter.
_NAME = re.compile(r"(\d+(?:_\d+)?|\d+(?:\[\d+\])?\.[\w.-]+)-(\d+)(?:r(\d+))?", re.ASCII)


def member_worker_name(job_id: str, restart_count: int, index: int) -> str:
    """Name a member job's worker: ``123_4-0``, and ``123_4-0r1`` after the job's first requeue.

    ``job_id`` is the batch system's: ``123``, ``123_4``, ``17.server``, ``17[4].server``; ``index`` counts its workers.
    """
    return f"{job_id}-{index}r{restart_count}" if restart_count else f"{job_id}-{index}"


def read_member_name(name: str) -> tuple[str, int, int] | None:
    """Parse a name of :func:`member_worker_name` to its arguments; None for other names, such as ``node1-0``."""
    # A node named 1234 or 17.server looks like a job: look the id up in the table of jobs.
    match = _NAME.fullmatch(name)
    return (match[1], int(match[3] or 0), int(match[2])) if match else None


def count_by_job(names: Iterable[str], members: Collection[str], head: str) -> Counter[str]:
    """Count workers by job id: ``members`` are jobs that join; all other workers belong to ``head``."""
    return Counter(name[0] if name and name[0] in members else head for name in map(read_member_name, names))


def by_number(name: str) -> tuple[str, bool, int, str]:
    """Return a sort key for workers' names: by host, then by number, ``cpu0`` after the workers with GPUs."""
    host, _, number = name.rpartition("-")
    digits = number.removeprefix("cpu")
    return host, digits != number, int(digits) if digits.isdigit() else 0, name


@dataclass(frozen=True, slots=True)
class JobWorkers:
    """The registered workers of one job."""

    addresses: tuple[str, ...] = ()
    restarts: int = 0  # of their job, as their names show
    silent: bool = False  # no recent heartbeat of any of them


NO_WORKERS = JobWorkers()


HEAD, MEMBER = "head", "member"


class Phase(enum.Enum):
    """The phases of a job's life, in this order."""

    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    STUCK = "WILL NOT START"
    RUNNING = "RUNNING"  # its workers are unknown
    STARTING = "STARTING"
    UP = "UP"
    SUSPENDED = "SUSPENDED"
    UNKNOWN = "UNKNOWN"
    DRAINING = "DRAINING"
    GONE = "GONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of a run. All times but ``ended_at`` are of one monotonic clock of this process."""

    id: str
    # HEAD: has the scheduler, is not counted among wanted jobs, never replaced or asked to leave. MEMBER: joins it.
    role: str = MEMBER
    log: str = ""  # absolute path, as exit_file
    exit_file: str = ""  # in which its script leaves its exit code; "": none
    nodes: int = 1
    expected: int = 0  # workers when all have registered; 0: none, or unknown
    submitted_s: float = 0.0
    # the batch system's last answer; None: not asked yet, not listed, or older than new workers
    status: JobStatus | None = None
    hosts: tuple[str, ...] = ()  # on which it runs, or ran last, as far as the batch system named them
    limit_s: int | None = None  # the walltime that the batch system gives it; None: unlimited, or unknown
    was_listed: bool = False  # by an answer of the batch system
    unasked: bool = False  # workers have registered since the last answer: the batch system may know the nodes now
    missing_since_s: float | None = None  # since when answers do not list it
    workers: int = 0  # registered
    restarts: int = 0  # requeues under this id, as its workers' names show
    started_s: float | None = None  # first seen running since its last requeue
    alone_since_s: float | None = None  # running without any worker since then
    silent_since_s: float | None = None  # no heartbeat of any of its workers since then
    first_worker_s: float | None = None  # when its first worker registered, requeues included
    was_full: bool = False  # all its workers were registered at once since its last requeue
    retired_s: float | None = None  # when it was asked to hand over its data and leave
    cancelled_s: float | None = None
    left_s: float | None = None  # since when its script's exit code exists; a requeued job removes it
    left_code: int | None = None
    why: str = ""  # it ended without our request
    ended_at: datetime | None = None  # when its end was noticed, if without our request
    # for people, from describe(): phase, text with reason and start, start of a pending job
    phase: Phase = Phase.SUBMITTED
    text: str = ""
    starts: str = ""

    @property
    def is_head(self) -> bool:
        """True if it has the scheduler."""
        return self.role == HEAD

    @property
    def has(self) -> str:
        """Its processes, for people: scheduler, workers, or both."""
        if not self.is_head:
            return "workers"
        return "scheduler, workers" if self.expected else "scheduler"

    @property
    def state(self) -> JobState | None:
        """The state in the batch system's last answer."""
        return self.status.state if self.status else None

    @property
    def is_missing(self) -> bool:
        """True if the batch system's last answer does not list it."""
        return self.status is None and self.missing_since_s is not None

    @property
    def leaving(self) -> bool:
        """True if we retired or cancelled it."""
        return self.retired_s is not None or self.cancelled_s is not None

    def listed(self, status: JobStatus | None, now_s: float) -> Self:
        """Return the job after an answer of the batch system; None: the answer does not list it."""
        if status is None:
            return self._with(status=None, unasked=False, missing_since_s=_or(self.missing_since_s, now_s))
        facts = {"hosts": status.hosts or self.hosts, "limit_s": status.limit_s or self.limit_s, "was_listed": True}
        after = self._with(status=status, unasked=False, missing_since_s=None, **facts)
        if status.state is JobState.SUSPENDED:
            return after._with(started_s=_or(self.started_s, now_s), alone_since_s=None)
        if status.state is JobState.RUNNING:
            alone_s = None if self.workers else _or(self.alone_since_s, now_s)
            return after._with(started_s=_or(self.started_s, now_s), alone_since_s=alone_s)
        return after._waiting_again()

    @property
    def heard(self) -> bool:
        """True if heartbeats come from its workers."""
        return self.workers > 0 and self.silent_since_s is None

    def registered(self, workers: int, now_s: float, restarts: int = 0, *, silent: bool = False) -> Self:
        """Return the job with this number of registered workers; ``restarts`` is from the newest worker's name."""
        if not workers:
            alone_s = now_s if self.workers else self.alone_since_s
            if self.state is JobState.SUSPENDED:  # its workers are stopped, and the scheduler has removed them
                alone_s = None
            return self._with(workers=0, alone_since_s=alone_s, silent_since_s=None)._waiting_again()
        again = restarts > self.restarts
        # A new worker proves that the job runs: an answer that it waits is older.
        stale = (again or workers > self.workers) and self.state in (*WAITING, JobState.SUSPENDED)
        return self._with(
            workers=workers,
            restarts=max(restarts, self.restarts),
            status=None if stale else self.status,
            unasked=self.unasked or stale or (self.status is None and not self.workers),
            missing_since_s=self.missing_since_s if silent else None,
            silent_since_s=_or(self.silent_since_s, now_s) if silent else None,
            started_s=now_s if again else _or(self.started_s, now_s),
            alone_since_s=None,
            first_worker_s=_or(self.first_worker_s, now_s),
            left_s=self.left_s if silent else None,
            was_full=workers >= self.expected or (self.was_full and not again),
        )

    def left(self, has_left: bool, code: int | None, now_s: float) -> Self:
        """Return the job after a check for the exit code of its script."""
        return self._with(left_s=_or(self.left_s, now_s) if has_left else None, left_code=code)

    def gone(self, why: str, at: datetime) -> Job:
        """Return the job after an end without our request, without the facts of this process."""
        return Job(id=self.id, role=self.role, log=self.log, exit_file=self.exit_file, why=why, ended_at=at)

    def _waiting_again(self) -> Self:
        """Return a requeued job without facts of its previous run, whose workers may leave a little later."""
        if self.workers or self.state not in WAITING:
            return self
        return self._with(started_s=None, alone_since_s=None, was_full=False)

    def _with(self, **changes: Any) -> Self:
        """Return the job with these values: a new one only if it differs, since that takes 11 us."""
        return replace(self, **changes) if any(getattr(self, name) != v for name, v in changes.items()) else self


def _or(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s


# Shown for a cluster that has all its workers; the other words are phases of jobs.
READY = "READY"
SILENT = "the batch system does not answer"
OUTLIVES = "with scheduler='here' a cluster outlives its jobs"
_MOST_NODES = 4
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)")


class End(enum.Enum):
    """How a cluster object has ended."""

    CLOSED = "closed"  # with its jobs
    LEFT = "left"  # without its jobs
    LOST = "lost"  # because its jobs ended


_AFTER = {End.CLOSED: "closed", End.LEFT: "this object has left it", End.LOST: "the cluster is lost"}


def format_status(status: JobStatus) -> str:
    """Format a state in the batch system's words: ``exit code 1, FAILED, NonZeroExitCode``."""
    code = "" if status.exit_code is None else f"exit code {status.exit_code}"
    return ", ".join(filter(None, (code, status.native, status.reason, status.trouble)))


def format_end(job_id: str, status: JobStatus, hosts: Sequence[str] = ()) -> str:
    """Format, for errors, that a job has ended, or will never start; ``hosts`` are those on which it was tried last."""
    details = ", ".join(filter(None, (status.reason, status.trouble)))
    reason = f" ({details})" if details else ""
    if status.state is JobState.STUCK:
        do = f"Request resources that exist ({status.advice}), or ask the site's administrators about this job"
        if not status.advice:  # it was tried
            last = f" (at last {', '.join(hosts)})" if hosts else ""
            do = f"Its nodes{last}, or a hook of the site there, refused it: ask the site's administrators about them"
        return f"job {job_id} will not start: {status.native}{reason}. {do}"
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    return f"job {job_id} has ended: {status.native or 'gone'}{reason}{code}"


def format_script_end(code: int | None) -> str:
    """Format that a job's script has ended, with its exit code if known."""
    return "its script has ended" if code is None else f"its script has ended with exit code {code}"


def format_missing(for_s: float = 0.0, job: str = "it") -> str:
    """Format that the batch system does not list a job, or has not listed it for ``for_s``; 0: no time."""
    if not for_s:
        return f"the batch system does not list {job}"
    return f"the batch system has not listed {job} for {for_s:g} s"


def describe(job: Job, today: date, end: End | None = None, *, reached: bool = True) -> Job:
    """Return the job with its phase and text for people; times on another day than ``today`` have a date.

    ``end``: how the cluster object ended, if it has: it no longer polls. ``reached=False``: the scheduler cannot be
    asked for workers.
    """
    status, state = job.status, job.state
    if job.ended_at:
        moment = f"{job.ended_at:%H:%M}" if job.ended_at.date() == today else f"{job.ended_at:%Y-%m-%d %H:%M}"
        return _in_phase(job, Phase.GONE, job.why, f"at {moment}")
    if status and state is JobState.ENDED:
        return _in_phase(job, Phase.GONE, format_status(status))
    if end:
        return _in_phase(job, Phase.GONE if end is End.CLOSED else Phase.UNKNOWN, _AFTER[end])
    if status and state is JobState.RUNNING and not reached:
        return _in_phase(job, Phase.RUNNING, status.trouble)
    if job.leaving:
        return _in_phase(job, Phase.DRAINING, "" if job.cancelled_s is None else "cancelled")
    if status and state is JobState.SUSPENDED:
        return _in_phase(job, Phase.SUSPENDED, status.reason)
    if status and state is JobState.STUCK and not job.workers:
        return _in_phase(job, Phase.STUCK, _reason(status))
    if status and state in WAITING and not job.workers:
        starts = status.starts
        if match := _MOMENT.match(starts):
            starts = match[2] if match[1] == today.isoformat() else f"{match[1]} {match[2]}"
        return replace(job, phase=Phase.PENDING, text=_pending((_reason(status),), starts), starts=starts)
    if status and state is JobState.UNKNOWN and not job.workers:
        return _in_phase(job, Phase.UNKNOWN, format_status(status))
    if job.is_missing and not job.workers:
        return _in_phase(job, Phase.UNKNOWN, format_missing())
    if status is None and not job.workers and job.started_s is None:
        return _in_phase(job, Phase.SUBMITTED)
    count = f"{job.workers}/{job.expected}" if job.expected else str(job.workers or "")
    trouble = status.trouble if status and not job.heard else ""
    if job.workers and (job.was_full or job.workers >= job.expected):
        return _in_phase(job, Phase.UP, trouble, count)
    lost = "lost its workers" if job.was_full and not job.workers else ""
    return _in_phase(job, Phase.STARTING, ": ".join(filter(None, (lost, trouble))), count)


def _in_phase(job: Job, phase: Phase, why: str = "", detail: str = "") -> Job:
    text = f"{phase.value} {detail}".rstrip()
    return replace(job, phase=phase, text=f"{text} ({why})" if why else text)


def _reason(status: JobStatus) -> str:
    """Format why a job does not start: a state other than pending, the reason, the request to make instead."""
    state = "" if status.state in (JobState.PENDING, JobState.STUCK) else status.state.value
    reason = f"{status.reason}: ask for {status.advice}" if status.advice else status.reason
    return ", ".join(filter(None, (state, reason, status.trouble if status.state is not JobState.STUCK else "")))


def _pending(reasons: Iterable[str], starts: str) -> str:
    reason = ", ".join(dict.fromkeys(filter(None, reasons)))
    return f"{Phase.PENDING.value}{f' ({reason})' if reason else ''}{f', starts about {starts}' if starts else ''}"


def summary_line(jobs: Sequence[Job], workers: int, target: int, nodes: int = 0) -> str:
    """Format a cluster's present jobs and workers in a line: ``2 PENDING (Priority), 3 UP; 12 of 20 workers``."""
    if workers >= target:
        where = f" on {counted(nodes, 'node')}" if nodes and workers else ""
        return f"{READY} {counted(workers, 'worker')}{where}"
    shown = _shown(jobs)
    if len(shown) == 1 and shown[0].phase is not Phase.UP:
        return shown[0].text
    return f"{_parts(shown)}; {workers} of {counted(target, 'worker')}"


def phases_line(jobs: Sequence[Job]) -> str:
    """Format the phases of a cluster's jobs as one line; see :func:`summary_line`."""
    shown = _shown(jobs)
    return shown[0].text if len(shown) == 1 else _parts(shown)


def _shown(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.phase is not Phase.GONE] or list(jobs)


def _parts(jobs: Sequence[Job]) -> str:
    parts = []
    for phase in Phase:
        if here := [job for job in jobs if job.phase is phase]:
            # A time without a date is today, so it is earlier.
            starts = min((job.starts for job in here if job.starts), key=lambda s: (len(s), s), default="")
            pending = _pending([_reason(job.status) for job in here if job.status], starts)
            troubles = [job.status.trouble for job in here if job.status and phase is Phase.STARTING]
            trouble = ", ".join(dict.fromkeys(filter(None, troubles)))
            other = f"{phase.value} ({trouble})" if trouble else phase.value
            parts.append(f"{len(here)} {pending if phase is Phase.PENDING else other}")
    return ", ".join(parts) or "no job"


def note_lines(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Format one line for each text, with its nodes: ``node1, node2: …``, ``node1 and 63 others: …``."""
    nodes: dict[str, list[str]] = {}
    for node, text in notes:
        nodes.setdefault(text, []).append(node)
    listed = (", ".join(n) if len(n) <= _MOST_NODES else f"{n[0]} and {len(n) - 1} others" for n in nodes.values())
    return [f"{names}: {text}" for names, text in zip(listed, nodes, strict=True)]


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
    late = job.left_s is not None and now_s >= job.left_s + limit_s
    if status.state is JobState.RUNNING and not job.workers and late:
        still = f"though the batch system still has it in state {status.native}"
        return f"job {job.id} has ended: {format_script_end(job.left_code)} {limit_s:g} s ago, {still}"
    return ""


def why_ending(job: Job, now_s: float) -> str:
    """Return that a member's script has ended although the job is there; "" while it may start again."""
    if job.left_s is None or now_s < job.left_s + ENDING_S or not _ends_by_itself(job):
        return ""
    return f"{format_script_end(job.left_code)}, {job.status.trouble if job.status else ''}"


def _ends_by_itself(job: Job) -> bool:
    """Tell whether a job is ending since its script has ended, not by a signal, after which it may start again."""
    return bool(job.status and job.status.is_ending) and job.left_code not in (None, _TERMINATED)


def why_missing(job: Job, since_s: float, now_s: float) -> str:
    """Return why to give up a job that is not listed; "" while it may exist."""
    # since_s: since when its scheduler does not answer; older answers of the batch system do not count.
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
