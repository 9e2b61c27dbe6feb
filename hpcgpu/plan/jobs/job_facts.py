"""The facts about one job, and how answers of the batch system and workers change them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job as the batch system and its workers show it. All times are of one monotonic clock.

    Attributes
    ----------
    expected : int
        Workers of the job when all have registered; 0: unknown.
    status : JobStatus or None
        The batch system's last answer; None: not asked yet, not listed, or outdated by newer workers.
    hosts : tuple of str
        The nodes on which it runs, or ran last, as far as the batch system has named them.
    unasked : bool
        Workers have registered since the batch system's last answer: it may know the nodes now.
    missing_since_s : float or None
        Since when the batch system's answers have not listed it.
    workers : int
        Registered workers.
    restarts : int
        How often the batch system has requeued it under this id, as its workers' names say.
    started_s : float or None
        When it was first seen running since its last requeue.
    alone_since_s : float or None
        Since when it has run without any worker.
    silent_since_s : float or None
        Since when no heartbeat has come from any of its workers.
    first_worker_s : float or None
        When its first worker registered, requeues included.
    was_full : bool
        All its workers have been registered at once since its last requeue.
    retired_s, cancelled_s : float or None
        When it was asked to hand over its data and leave; when it was cancelled.
    is_head : bool
        It has the scheduler: it does not count among the wanted jobs, and is never replaced or asked to leave.
    left_s, left_code : number or None
        Since when the exit code of its script has been there, and the code. A requeued job takes it away again.

    """

    id: str
    submitted_s: float
    expected: int
    status: JobStatus | None = None
    hosts: tuple[str, ...] = ()
    unasked: bool = False
    missing_since_s: float | None = None
    workers: int = 0
    restarts: int = 0
    started_s: float | None = None
    alone_since_s: float | None = None
    silent_since_s: float | None = None
    first_worker_s: float | None = None
    was_full: bool = False
    retired_s: float | None = None
    cancelled_s: float | None = None
    is_head: bool = False
    left_s: float | None = None
    left_code: int | None = None

    @property
    def state(self) -> JobState | None:
        """The state in the batch system's last answer."""
        return self.status.state if self.status else None

    @property
    def is_missing(self) -> bool:
        """The batch system's last answer does not list it."""
        return self.status is None and self.missing_since_s is not None

    @property
    def leaving(self) -> bool:
        """Retired or cancelled by us."""
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
        """Heartbeats come from its workers."""
        return self.workers > 0 and self.silent_since_s is None

    def registered(self, workers: int, now_s: float, restarts: int = 0, *, silent: bool = False) -> Self:
        """Return the job with so many registered workers; the name of the newest has the number of restarts."""
        if not workers:
            alone_s = now_s if self.workers else self.alone_since_s
            if self.state is JobState.SUSPENDED:  # its workers are stopped, and the scheduler has removed them
                alone_s = None
            return replace(self, workers=0, alone_since_s=alone_s, silent_since_s=None)._waiting_again()
        again = restarts > self.restarts
        # A new worker shows that the job runs: an answer to the contrary is older.
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

    def left(self, there: bool, code: int | None, now_s: float) -> Self:
        """Return the job after a look for the exit code of its script."""
        return replace(self, left_s=_or(self.left_s, now_s) if there else None, left_code=code)

    def _waiting_again(self) -> Self:
        """Return a requeued job without the facts of its previous run; workers of that run may leave a little later."""
        if self.workers or self.state not in WAITING:
            return self
        return replace(self, started_s=None, alone_since_s=None, was_full=False)


def _or(known_s: float | None, now_s: float) -> float:
    return now_s if known_s is None else known_s
