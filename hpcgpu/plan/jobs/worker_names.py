"""Names of member jobs' workers: the name of a worker tells its job, without a question to anybody."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# The part after the last hyphen is ours; a PBS server's name may have hyphens, digits and any letter in it.
_NAME = re.compile(r"(\d+(?:_\d+)?|\d+(?:\[\d+\])?\.[\w.-]+)-(\d+)(?:r(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class MemberName:
    """The parts of the name of a member job's worker."""

    job_id: str
    restart_count: int
    index: int


def member_worker_name(job_id: str, restart_count: int, index: int) -> str:
    """Return the name of a member job's worker: ``123_4-0``, and ``123_4-0r1`` after the job's first requeue.

    Parameters
    ----------
    job_id : str
        As the batch system writes it: ``123``, ``123_4``, ``17.server``, ``17[4].server``.
    restart_count : int
        How often the batch system has requeued the job under this id.
    index : int
        The worker's number in the job.

    """
    return f"{job_id}-{index}r{restart_count}" if restart_count else f"{job_id}-{index}"


def read_member_name(name: str) -> MemberName | None:
    """Return the parts of a name; None for a name that :func:`member_worker_name` has not made, such as ``node1-0``.

    A node named ``1234`` or ``17.server`` looks like a job: look the id up in the table of jobs.
    """
    found = _NAME.fullmatch(name)
    return MemberName(found[1], int(found[3] or 0), int(found[2])) if found else None


def count_by_job(names: Iterable[str], members: Collection[str], head: str) -> Counter[str]:
    """Return how many workers each job of a cluster has, by its id.

    Parameters
    ----------
    names : iterable of str
        The names of the registered workers.
    members : collection of str
        Ids of the jobs that join the scheduler of another job.
    head : str
        Id of the job with the scheduler, to which all other workers belong.

    """
    found = (read_member_name(name) for name in names)
    return Counter(name.job_id if name and name.job_id in members else head for name in found)


def by_number(name: str) -> tuple[str, bool, int, str]:
    """Return a sort key for workers' names: by host, then by number, ``cpu0`` after the workers with GPUs."""
    host, _, number = name.rpartition("-")
    digits = number.removeprefix("cpu")
    return host, digits != number, int(digits) if digits.isdigit() else 0, name
