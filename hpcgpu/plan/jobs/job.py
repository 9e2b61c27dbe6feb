"""One job of a run: what is known of it, and how each answer or event changes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self

from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING

HEAD, MEMBER = "head", "member"


@dataclass(frozen=True, slots=True)
class JobWorkers:
    """The registered workers of one job."""

    addresses: tuple[str, ...] = ()
    restarts: int = 0  # of their job, as their names show
    silent: bool = False  # no recent heartbeat of any of them
    pool: str = ""  # as a resource of theirs names it; "": none


NO_WORKERS = JobWorkers()


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
    pool: str = ""  # of a member: the pool that it is of; "": the cluster's own
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
    script_ended_s: float | None = None  # since when its script's exit code exists; a requeued job removes it
    script_code: int | None = None
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
            return f"workers of {self.pool}" if self.pool else "workers"
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
            script_ended_s=self.script_ended_s if silent else None,
            was_full=workers >= self.expected or (self.was_full and not again),
        )

    def script_ended(self, has_ended: bool, code: int | None, now_s: float) -> Self:
        """Return the job after a check for the exit code of its script."""
        return self._with(script_ended_s=_or(self.script_ended_s, now_s) if has_ended else None, script_code=code)

    def gone(self, why: str, at: datetime) -> Job:
        """Return the job after an end without our request, without the facts of this process."""
        kept = {name: getattr(self, name) for name in ("id", "role", "pool", "log", "exit_file")}
        return Job(**kept, why=why, ended_at=at)

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
