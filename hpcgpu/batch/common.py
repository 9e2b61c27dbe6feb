"""The common parts of batch systems: arrays, questions that do not apply, and advice for jobs that wait for ever."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from hpcgpu.errors import ConfigError
from hpcgpu.model import Command, CpuSet, JobSpec, Offer, Result

# Reasons and comments of jobs that wait for ever unless they or the cluster change (Slurm 22.05.8: main.c, and tests;
# OpenPBS: tests/data/batch/pbs). The reasons for nodes that are down are different.
_ADVICE = (
    (r"PartitionNodeLimit|M(ax|in)Nodes?PerJob", "fewer nodes="),
    (r"PartitionTimeLimit|MaxWallDurationPerJob|resource: walltime", "a shorter walltime="),
    (r"MaxGRESPerJob|resource: (ngpus|gpus)", "fewer gpus_per_node="),
    (r"MaxCpuPerJob|resource: ncpus", "fewer cores_per_gpu="),
    (r"MaxMem\w*PerJob|resource: mem", "less memory="),
    (r"PartitionConfig|BadConstraints|Can Never Run", "less"),
    (r"AccountNotAllowed|InvalidAccount", "another account="),
    (r"Q[oO][sS]NotAllowed|InvalidQOS", "another --qos in job_extra_directives="),
)
_ELSEWHERE = ", or another queue="


def advice(reason: str) -> str:
    """Return what to ask for instead if a job's reason for waiting will not pass; "" for other reasons."""
    found = next((text for pattern, text in _ADVICE if re.search(pattern, reason)), "")
    return f"{found}{_ELSEWHERE}" if found else ""


def by_array(job_ids: Sequence[str], element: re.Pattern[str]) -> Mapping[tuple[str, str], set[int]]:
    """Group ids by array: the parts of its elements' ids before and after the index, and the indexes."""
    # element matches an element's id in three groups: before the index, the index, after it. Another job is alone,
    # without an index.
    out: dict[tuple[str, str], set[int]] = {}
    for job_id in job_ids:
        match = element.fullmatch(job_id)
        indexes = out.setdefault((match[1], match[3]) if match else (job_id, ""), set())
        if match:
            indexes.add(int(match[2]))
    return out


def runs(indexes: Iterable[int]) -> tuple[str, ...]:
    """Return single indexes and ranges without a hole, in order: ``1``, ``3-4`` for 1, 3, 4."""
    return tuple(filter(None, str(CpuSet(indexes)).split(",")))


def split(count: int, limit: int) -> tuple[int, ...]:
    """Return the sizes of the fewest submissions for ``count`` jobs, none larger than ``limit``."""
    full, rest = divmod(count, limit)
    return (limit,) * full + ((rest,) if rest else ())


def check_limit(limit: int, system: str) -> None:
    """Raise ConfigError for a limit below one job."""
    if limit < 1:
        raise ConfigError(f"array_limit={limit} of {system}; allowed: 1 (no arrays) or more")


def unasked(spec: JobSpec, *, memory: bool, cpus: bool) -> tuple[str, ...]:
    """Return a message on each part of a request for which the site's dialect has no option."""
    parts = {
        "memory=": spec.memory_per_node_bytes is not None and not memory,
        "cores_per_gpu=": spec.cpus_per_task is not None and not cpus,
    }
    return tuple(
        f"{name} is not asked of the batch system: at this site jobs get it with their GPUs or nodes"
        for name, is_given in parts.items()
        if is_given
    )


class Plain:
    """A batch system that is not asked about nodes and limits beforehand, and needs no force to end a job."""

    __slots__ = ()

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return no messages."""
        return ()

    def force(self, result: Result) -> Command | None:
        """Return None: ``cancel`` needs no force."""
        return None

    def offers(self, spec: JobSpec) -> Command | None:
        """Return None: no command."""
        return None

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return no offers."""
        return ()

    def test(self, script: str) -> Command | None:
        """Return None: no command checks a script (qsub submits, or does nothing)."""
        return None

    def read_test(self, result: Result) -> str:
        """Return ""."""
        return ""
