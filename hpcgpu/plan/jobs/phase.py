"""Describe jobs for people: a phase and short text for each job, and one line for all jobs."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime

from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.units import counted

# Shown for a cluster that has all its workers; the other words are phases of jobs.
READY = "READY"
SILENT_WORDS = "the batch system does not answer"
_MOST_NODES = 4
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)")


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


class End(enum.Enum):
    """How a cluster object has ended."""

    CLOSED = "closed"  # with its jobs
    LEFT = "left"  # without its jobs
    LOST = "lost"  # because its jobs ended


@dataclass(frozen=True, slots=True)
class JobView:
    """One job for people."""

    id: str
    phase: Phase
    text: str  # complete, with reason and starts
    reason: str = ""  # of pending and gone jobs
    starts: str = ""  # of pending jobs


def words(status: JobStatus) -> str:
    """Format a state in the batch system's words: ``exit code 1, FAILED, NonZeroExitCode``."""
    code = "" if status.exit_code is None else f"exit code {status.exit_code}"
    return ", ".join(filter(None, (code, status.native, status.reason, status.trouble)))


def reason_of(status: JobStatus) -> str:
    """Format why a job does not start, and the request to make instead if waiting does not help."""
    return f"{status.reason}: ask for {status.advice}" if status.advice else status.reason


def over_words(job_id: str, status: JobStatus) -> str:
    """Format, for errors, that a job has ended, or will never start."""
    said = ", ".join(filter(None, (status.reason, status.trouble)))
    reason = f" ({said})" if said else ""
    if status.state is JobState.STUCK:
        advice = f" ({status.advice})" if status.advice else ""
        return (
            f"job {job_id} will not start: {status.native}{reason}. Ask for what there is{advice}, or ask the site's "
            "administrators about this job"
        )
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    return f"job {job_id} has ended: {status.native or 'gone'}{reason}{code}"


def ending_words(job_id: str, status: JobStatus) -> str:
    """Format that a job is on its way out."""
    return f"job {job_id} is ending ({status.trouble})"


def late_words(job_id: str, status: JobStatus, code: int | None, limit_s: float) -> str:
    """Format, for errors, that a job's script ended ``limit_s`` ago though the batch system still lists the job."""
    still = f"though the batch system still has it in state {status.native}"
    return f"job {job_id} has ended: {script_words(code)} {limit_s:g} s ago, {still}"


def missing_words(for_s: float = 0.0, job: str = "it") -> str:
    """Format that the batch system does not list a job, or has not listed it for ``for_s``; 0: no time."""
    return (
        f"the batch system has not listed {job} for {for_s:g} s" if for_s else f"the batch system does not list {job}"
    )


def gone_words(status: JobStatus) -> str:
    """Format why a job that has ended is gone."""
    return words(status) or "ended"


def alone_words(for_s: float) -> str:
    """Format that a job has run without a worker for ``for_s``."""
    return f"ran for {for_s:g} s without a worker"


def script_words(code: int | None) -> str:
    """Format that a job's script has ended, with its exit code if known."""
    return "its script has ended" if code is None else f"its script has ended with exit code {code}"


def describe(job: JobFacts, today: date) -> JobView:
    """Describe a job; a start on another day than ``today`` is shown with its date."""
    status, state = job.status, job.state
    if status and state is JobState.ENDED:
        return _view(job, Phase.GONE, words(status))
    if job.leaving:
        return _view(job, Phase.DRAINING, "" if job.cancelled_s is None else "cancelled")
    if status and state is JobState.SUSPENDED:
        return _view(job, Phase.SUSPENDED, status.reason)
    if status and state is JobState.STUCK and not job.workers:
        return _view(job, Phase.STUCK, reason_of(status))
    if status and state in WAITING and not job.workers:
        return _pending(job, status, today)
    if job.workers or (status and state is JobState.RUNNING):
        return _running(job)
    if status or job.is_missing:
        return _view(job, Phase.UNKNOWN, words(status) if status else missing_words())
    return _running(job) if job.started_s is not None else _view(job, Phase.SUBMITTED)


def describe_unreached(job: JobFacts, today: date) -> JobView:
    """Describe a job by the batch system alone: its scheduler cannot be asked for workers."""
    if job.status and job.state is JobState.RUNNING:
        return _view(job, Phase.RUNNING, job.status.trouble)
    return describe(job, today)


def describe_scheduler(job_id: str) -> JobView:
    """Describe a job with a scheduler and no workers, once the scheduler is up."""
    return JobView(job_id, Phase.UP, Phase.UP.value)


def describe_gone(job_id: str, why: str, at: datetime, today: date) -> JobView:
    """Describe a job that is gone: the reason, and when it was noticed."""
    moment = f"{at:%H:%M}" if at.date() == today else f"{at:%Y-%m-%d %H:%M}"
    return JobView(job_id, Phase.GONE, f"{Phase.GONE.value} at {moment} ({why})", why)


def describe_after(job_id: str, status: JobStatus | None, end: End) -> JobView:
    """Describe a job whose cluster object has ended, and no longer polls."""
    if status and status.state is JobState.ENDED:
        return JobView(job_id, Phase.GONE, f"{Phase.GONE.value} ({words(status)})", words(status))
    phase = Phase.GONE if end is End.CLOSED else Phase.UNKNOWN
    why = {End.CLOSED: "closed", End.LEFT: "this object has left it", End.LOST: "the cluster is lost"}[end]
    return JobView(job_id, phase, f"{phase.value} ({why})", why)


def _running(job: JobFacts) -> JobView:
    count = f"{job.workers}/{job.expected}" if job.expected else str(job.workers)
    trouble = job.status.trouble if job.status and not job.heard else ""
    if job.workers and (job.was_full or job.workers >= job.expected):
        return _view(job, Phase.UP, trouble, count)
    why = ": ".join(filter(None, ("lost its workers" if job.was_full and not job.workers else "", trouble)))
    return _view(job, Phase.STARTING, why, count)


def _view(job: JobFacts, phase: Phase, why: str = "", count: str = "") -> JobView:
    text = f"{phase.value} {count}".rstrip()
    return JobView(job.id, phase, f"{text} ({why})" if why else text)


def _pending(job: JobFacts, status: JobStatus, today: date) -> JobView:
    state = "" if status.state is JobState.PENDING else status.state.value
    reason = ", ".join(filter(None, (state, reason_of(status), status.trouble)))
    found = _MOMENT.match(status.starts)
    moment = status.starts
    if found:
        moment = found[2] if found[1] == today.isoformat() else f"{found[1]} {found[2]}"
    return JobView(job.id, Phase.PENDING, _pending_text((reason,), moment), reason, moment)


def _pending_text(reasons: Sequence[str], starts: str) -> str:
    said = ", ".join(dict.fromkeys(filter(None, reasons)))
    return f"{Phase.PENDING.value}{f' ({said})' if said else ''}{f', starts about {starts}' if starts else ''}"


def summary_line(views: Sequence[JobView], workers: int, wanted: int, nodes: int = 0) -> str:
    """Format one line for a whole cluster: ``2 PENDING (Priority), 3 UP; 12 of 20 workers``.

    Gone jobs are left out, unless all are gone. ``workers`` have registered, on ``nodes``; 0: unknown.
    """
    if workers >= wanted:
        where = f" on {counted(nodes, 'node')}" if nodes and workers else ""
        return f"{READY} {counted(workers, 'worker')}{where}"
    shown = _shown(views)
    if len(shown) == 1 and shown[0].phase is not Phase.UP:
        return shown[0].text
    return f"{_parts(shown)}; {workers} of {counted(wanted, 'worker')}"


def phases_line(views: Sequence[JobView]) -> str:
    """Format the phases of a cluster's jobs as one line; see :func:`summary_line`."""
    shown = _shown(views)
    return shown[0].text if len(shown) == 1 else _parts(shown)


def _shown(views: Sequence[JobView]) -> list[JobView]:
    return [v for v in views if v.phase is not Phase.GONE] or list(views)


def _parts(views: Sequence[JobView]) -> str:
    parts = [_part(phase, [v for v in views if v.phase is phase]) for phase in Phase]
    return ", ".join(filter(None, parts)) or "no job"


def note_lines(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Format one line for each text, with its nodes: ``node1, node2: …``, ``node1 and 63 others: …``."""
    nodes: dict[str, list[str]] = {}
    for node, text in notes:
        nodes.setdefault(text, []).append(node)
    return [f"{_listed(names)}: {text}" for text, names in nodes.items()]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _MOST_NODES else f"{names[0]} and {len(names) - 1} others"


def _part(phase: Phase, views: Sequence[JobView]) -> str:
    if not views:
        return ""
    if phase is not Phase.PENDING:
        return f"{len(views)} {phase.value}"
    # A time without a date is today, so it is earlier.
    starts = min((v.starts for v in views if v.starts), key=lambda s: (len(s), s), default="")
    return f"{len(views)} {_pending_text([v.reason for v in views], starts)}"
