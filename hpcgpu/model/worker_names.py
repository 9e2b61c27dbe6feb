"""Names of workers: ``node1-0``, and of jobs that come and go ``123_4-0r1``."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable

# The part after the last hyphen is ours; a PBS server's name may contain hyphens, digits and any letter.
_NAME = re.compile(r"(\d+(?:_\d+)?|\d+(?:\[\d+\])?\.[\w.-]+)-(\d+)(?:r(\d+))?", re.ASCII)


def member_worker_name(job_id: str, restart_count: int, index: int) -> str:
    """Name a member job's worker: ``123_4-0``, and ``123_4-0r1`` after the job's first requeue.

    ``job_id`` is the batch system's: ``123``, ``123_4``, ``17.server``, ``17[4].server``; ``index`` counts its workers.
    """
    return f"{job_id}-{index}r{restart_count}" if restart_count else f"{job_id}-{index}"


@functools.lru_cache(1 << 14)  # each worker's name is read whenever workers come or go
def read_member_name(name: str) -> tuple[str, int, int] | None:
    """Parse a name of :func:`member_worker_name` to its arguments; None for other names, such as ``node1-0``.

    A node named 1234 or 17.server looks like a job: look the id up in the table of jobs.
    """
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
