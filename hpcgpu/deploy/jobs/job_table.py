"""The jobs of a cluster: the facts about each, and its record."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from hpcgpu.deploy.jobs.record import Gone, RecordedJob
from hpcgpu.model import JobState, JobStatus
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.phase import SILENT_WORDS

_SILENT = JobStatus(JobState.UNKNOWN, "", SILENT_WORDS)
# Enough for people; a cluster of weeks has thousands.
_GONE = 5


@dataclass(frozen=True, slots=True)
class Present:
    """The registered workers of one job."""

    addresses: tuple[str, ...] = ()
    restarts: int = 0  # of their job, as their names show
    silent: bool = False  # no recent heartbeat of any of them


@dataclass(frozen=True, slots=True)
class Row:
    """A job that is not gone: its record, and its present facts."""

    recorded: RecordedJob
    facts: JobFacts


class JobTable:
    """The jobs in the order of their submission: the one with the scheduler, and its members, which come and go."""

    def __init__(self, expected: int) -> None:
        self.expected = expected  # workers of each member
        # Each row is replaced as a whole: the user's thread reads while the event loop's thread writes.
        self._rows: dict[str, Row] = {}
        self._forgotten: dict[str, int] = {}
        self.gone: deque[Gone] = deque(maxlen=_GONE)  # the last few, the newest first

    @property
    def head(self) -> Row | None:
        """The job with the scheduler; None if the scheduler is on this machine."""
        return next((row for row in tuple(self._rows.values()) if row.facts.is_head), None)

    @property
    def ids(self) -> list[str]:
        """The batch system's ids."""
        return list(self._rows)

    @property
    def known(self) -> set[str]:
        """The ids of all jobs that have ever been submitted."""
        return {*self._rows, *self._forgotten}

    @property
    def members(self) -> tuple[Row, ...]:
        """The present jobs that come and go."""
        return tuple(row for row in tuple(self._rows.values()) if not row.facts.is_head)

    @property
    def jobs(self) -> tuple[JobFacts, ...]:
        """The facts about each."""
        return tuple(row.facts for row in tuple(self._rows.values()))

    @property
    def recorded(self) -> tuple[RecordedJob, ...]:
        """The record of each member."""
        return tuple(member.recorded for member in self.members)

    def add_head(self, recorded: RecordedJob, expected: int, now_s: float) -> None:
        """Add the job with the scheduler, which is never replaced, and its number of workers."""
        self._rows[recorded.id] = Row(
            recorded, JobFacts(id=recorded.id, submitted_s=now_s, expected=expected, is_head=True)
        )

    def add(self, recorded: Sequence[RecordedJob], now_s: float) -> None:
        """Add jobs that have been submitted."""
        for job in recorded:
            self._rows[job.id] = Row(job, JobFacts(id=job.id, submitted_s=now_s, expected=self.expected))

    def follow(self, recorded: Sequence[RecordedJob], gone: Sequence[Gone], now_s: float) -> None:
        """Take over exactly the jobs that another object has recorded, also as gone."""
        self.gone = deque(gone, maxlen=_GONE)
        for job_id in {row.recorded.id for row in self.members} - {job.id for job in recorded}:
            self.forget(job_id)
        self.add([job for job in recorded if job.id not in self._rows], now_s)

    def unknown(self, present: Mapping[str, Present]) -> list[str]:
        """Return jobs with workers that are not in the table: an answer of sbatch's was lost.

        Remaining workers of an ended job do not count, unless it was started again.
        """
        return [
            job_id
            for job_id, workers in present.items()
            if job_id not in self._rows and workers.restarts > self._forgotten.get(job_id, -1)
        ]

    def with_exit_codes(self, listed: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
        """Add the exit codes that the jobs' scripts have left to the batch system's answer; reads files."""
        rows = dict(self._rows)
        return {i: rows[i].recorded.with_exit_code(status) if i in rows else status for i, status in listed.items()}

    def listed(self, asked: Sequence[str], listed: Mapping[str, JobStatus], now_s: float) -> None:
        """Apply the batch system's answer about the polled jobs."""
        for job_id in asked:
            if member := self._rows.get(job_id):
                self._learned(member.facts.listed(listed.get(job_id), now_s))

    def unanswered(self, now_s: float) -> None:
        """Mark the scheduler's job as unknown if no worker is heard: the batch system does not answer."""
        if (head := self.head) and not head.facts.heard:
            self._learned(head.facts.listed(_SILENT, now_s))

    def left(self, there: bool, code: int | None, now_s: float) -> bool:
        """Record whether the script of the scheduler's job has ended; return True if that changed."""
        assert self.head
        before = self.head.facts
        self._learned(before.left(there, code, now_s))
        return (before.left_s is not None) != there

    def registered(self, present: Mapping[str, Present], now_s: float) -> None:
        """Apply the registered workers."""
        for job in self.jobs:
            here = present.get(job.id, Present())
            self._learned(job.registered(len(here.addresses), now_s, here.restarts, silent=here.silent))

    def cancelled(self, job_ids: Sequence[str], now_s: float) -> None:
        """Record that jobs have been cancelled."""
        for job_id in job_ids:
            if member := self._rows.get(job_id):
                self._learned(replace(member.facts, cancelled_s=now_s))

    def retired(self, job_id: str, now_s: float) -> None:
        """Record that a job has been asked to leave."""
        self._learned(replace(self._rows[job_id].facts, retired_s=now_s))

    def ended(self, job_id: str, why: str, at: datetime) -> RecordedJob:
        """Remove a job that has ended; return its record."""
        unasked = not self._rows[job_id].facts.leaving
        recorded = self.forget(job_id)
        if unasked:
            self.gone.appendleft(Gone(recorded, why, at))
        return recorded

    def forget(self, job_id: str) -> RecordedJob:
        """Remove a job that is gone; return its record."""
        member = self._rows.pop(job_id)
        self._forgotten[job_id] = member.facts.restarts
        return member.recorded

    def _learned(self, facts: JobFacts) -> None:
        self._rows[facts.id] = Row(self._rows[facts.id].recorded, facts)
