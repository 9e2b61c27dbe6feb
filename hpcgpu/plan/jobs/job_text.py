"""Texts about jobs for people: a job's phase, its end, and a line for all."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import date

from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job import Job, Phase
from hpcgpu.units import counted

# Shown for a cluster that has all its workers; the other words are phases of jobs.
READY = "READY"
SILENT = "the batch system does not answer"
OUTLIVES = "with scheduler='here' a cluster outlives its jobs"
_MOST_NODES, _MOST_REASONS = 4, 5
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


def absence(absent: Collection[tuple[str, str]]) -> str:
    """Say how many workers are absent, and why (node, reason), in the room of a few lines; "" if none is."""
    lines = note_lines(dict.fromkeys(absent))
    more = [f"{len(lines) - _MOST_REASONS} more in the log"] if len(lines) > _MOST_REASONS else []
    reasons = "; ".join([*lines[:_MOST_REASONS], *more])
    return f"{counted(len(absent), 'worker')} not started, or lost: {reasons}" if absent else ""
