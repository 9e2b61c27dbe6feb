"""Decide about jobs: their requests, their next steps, their text for people.

Here are one job, its workers' names, and how answers of the batch system and of the workers change it.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self

from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING

# The part after the last hyphen is ours; a PBS server's name may contain hyphens, digits and any letter.
_NAME = re.compile(r"(\d+(?:_\d+)?|\d+(?:\[\d+\])?\.[\w.-]+)-(\d+)(?:r(\d+))?", re.ASCII)


def member_worker_name(job_id: str, restart_count: int, index: int) -> str:
    """Name a member job's worker: ``123_4-0``, and ``123_4-0r1`` after the job's first requeue.

    ``job_id`` is the batch system's: ``123``, ``123_4``, ``17.server``, ``17[4].server``; ``index`` counts its workers.
    """
    return f"{job_id}-{index}r{restart_count}" if restart_count else f"{job_id}-{index}"


def read_member_name(name: str) -> tuple[str, int, int] | None:
    """Parse a name of :func:`member_worker_name` to its arguments; None for other names, such as ``node1-0``.

    A node named ``1234`` or ``17.server`` looks like a job: look the id up in the table of jobs.
    """
    match = _NAME.fullmatch(name)
    return (match[1], int(match[3] or 0), int(match[2])) if match else None


def count_by_job(names: Iterable[str], members: Collection[str], head: str) -> Counter[str]:
    """Count workers by job id: ``members`` are jobs that join; all other workers belong to ``head``."""
    parts = map(read_member_name, names)
    return Counter(name[0] if name and name[0] in members else head for name in parts)


def by_number(name: str) -> tuple[str, bool, int, str]:
    """Return a sort key for workers' names: by host, then by number, ``cpu0`` after the workers with GPUs."""
    host, _, number = name.rpartition("-")
    digits = number.removeprefix("cpu")
    return host, digits != number, int(digits) if digits.isdigit() else 0, name


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
            since_s = now_s if self.missing_since_s is None else self.missing_since_s
            return replace(self, status=None, unasked=False, missing_since_s=since_s)
        hosts = status.hosts or self.hosts
        after = replace(self, status=status, hosts=hosts, unasked=False, missing_since_s=None)
        if status.state in WAITING:
            return after._waiting_again()
        if status.state is JobState.SUSPENDED:
            return replace(after, started_s=_or(self.started_s, now_s), alone_since_s=None)
        if status.state is JobState.RUNNING:
            alone_s = None if self.workers else _or(self.alone_since_s, now_s)
            return replace(after, started_s=_or(self.started_s, now_s), alone_since_s=alone_s)
        return after

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
            return replace(self, workers=0, alone_since_s=alone_s, silent_since_s=None)._waiting_again()
        again = restarts > self.restarts
        # A new worker proves that the job runs: an answer that it waits is older.
        stale = (again or workers > self.workers) and self.state in (*WAITING, JobState.SUSPENDED)
        return replace(
            self,
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
        return replace(self, left_s=_or(self.left_s, now_s) if has_left else None, left_code=code)

    def gone(self, why: str, at: datetime) -> Job:
        """Return the job after an end without our request, without the facts of this process."""
        return Job(id=self.id, role=self.role, log=self.log, exit_file=self.exit_file, why=why, ended_at=at)

    def _waiting_again(self) -> Self:
        """Return a requeued job without facts of its previous run, whose workers may leave a little later."""
        if self.workers or self.state not in WAITING:
            return self
        return replace(self, started_s=None, alone_since_s=None, was_full=False)


def _or(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s
