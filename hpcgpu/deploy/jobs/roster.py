"""What is known of the jobs that come and go: their facts, and what is written down of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from hpcgpu.deploy.jobs.record import RecordedJob
from hpcgpu.model import JobStatus
from hpcgpu.plan.job_facts import JobFacts

# As many as people look at; a cluster of weeks has thousands.
_GONE = 5


@dataclass(frozen=True, slots=True)
class Present:
    """The registered workers of one job.

    Attributes
    ----------
    addresses : tuple of str
        Where they are.
    restarts : int
        How often their job was started again, as their names say.
    silent : bool
        None of them has been heard from for a while.

    """

    addresses: tuple[str, ...] = ()
    restarts: int = 0
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    """A job that is gone though nobody had asked it to leave: why, and when that was learned."""

    recorded: RecordedJob
    why: str
    at: datetime


class Roster:
    """The jobs in the order of their submission.

    Parameters
    ----------
    expected : int
        Workers of each job.

    Attributes
    ----------
    gone : deque of Gone
        The last few, the newest first.

    """

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self._facts: dict[str, JobFacts] = {}
        self._recorded: dict[str, RecordedJob] = {}
        self._forgotten: dict[str, int] = {}
        self.gone: deque[Gone] = deque(maxlen=_GONE)

    def __len__(self) -> int:
        return len(self._facts)

    @property
    def ids(self) -> list[str]:
        """The batch system's ids."""
        return list(self._facts)

    @property
    def known(self) -> set[str]:
        """The ids of all jobs that have ever been submitted."""
        return {*self._facts, *self._forgotten}

    @property
    def jobs(self) -> tuple[JobFacts, ...]:
        """What is known of each."""
        return tuple(self._facts.values())

    @property
    def recorded(self) -> tuple[RecordedJob, ...]:
        """What is to be written down of each."""
        return tuple(self._recorded.values())

    def add(self, recorded: Sequence[RecordedJob], now_s: float) -> None:
        """Take jobs that have been submitted."""
        for job in recorded:
            self._recorded[job.id] = job
            self._facts[job.id] = JobFacts(id=job.id, submitted_s=now_s, expected=self.expected)

    def follow(self, recorded: Sequence[RecordedJob], now_s: float) -> None:
        """Have exactly the jobs that somebody else has written down."""
        for job_id in {*self._facts} - {job.id for job in recorded}:
            self.forget(job_id)
        self.add([job for job in recorded if job.id not in self._facts], now_s)

    def unknown(self, present: Mapping[str, Present]) -> list[str]:
        """Return jobs whose workers are there, but which nobody has submitted: an answer of sbatch's was lost.

        Workers that are left of a job that has ended are none of these, unless it was started again.
        """
        return [
            job_id
            for job_id, workers in present.items()
            if job_id not in self._facts and workers.restarts > self._forgotten.get(job_id, -1)
        ]

    def listed(self, asked: Sequence[str], listed: Mapping[str, JobStatus], now_s: float) -> None:
        """Take the batch system's answer about the jobs that it was asked for."""
        for job_id in asked:
            if job := self._facts.get(job_id):
                status = listed.get(job_id)
                self._facts[job_id] = job.listed(status and self._recorded[job_id].with_exit_code(status), now_s)

    def registered(self, present: Mapping[str, Present], now_s: float) -> None:
        """Take the workers that are registered."""
        for job_id, job in self._facts.items():
            here = present.get(job_id, Present())
            self._facts[job_id] = job.registered(len(here.addresses), now_s, here.restarts, silent=here.silent)

    def cancelled(self, job_ids: Sequence[str], now_s: float) -> None:
        """Note that these have been cancelled."""
        self._facts |= {i: replace(self._facts[i], cancelled_s=now_s) for i in job_ids if i in self._facts}

    def retired(self, job_id: str, now_s: float) -> None:
        """Note that this one has been asked to leave."""
        self._facts[job_id] = replace(self._facts[job_id], retired_s=now_s)

    def ended(self, job_id: str, why: str, at: datetime) -> RecordedJob:
        """Let go of a job that has ended; return what was written down of it."""
        unasked = not self._facts[job_id].leaving
        recorded = self.forget(job_id)
        if unasked:
            self.gone.appendleft(Gone(recorded, why, at))
        return recorded

    def forget(self, job_id: str) -> RecordedJob:
        """Let go of a job that is gone; return what was written down of it."""
        self._forgotten[job_id] = self._facts.pop(job_id).restarts
        return self._recorded.pop(job_id)
