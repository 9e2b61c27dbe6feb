"""What a batch system has, where it is asked; and what to change of a job that waits for more."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgpu.errors import ConfigError
from hpcgpu.model import Command, JobSpec, Offer, Result
from hpcgpu.units import parse_duration_s

# Without --exact nodes of several kinds are one line, "8+" (sinfo(1), 22.05.8).
_FIELDS = "%R|%P|%D|%l|%s|%c|%m|%G"
_GPUS = re.compile(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)")
# Reasons and comments with which a job waits for ever unless it is changed, or what there is (22.05.8: main.c and the
# lab; OpenPBS: tests/data/batch/pbs). Nodes that are down have other words.
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


class NotAsked:
    """A batch system whose refusals and comments say it themselves."""

    __slots__ = ()

    def offers(self, spec: JobSpec) -> Command | None:
        """Return None: it is not asked."""
        return None

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return nothing."""
        return ()


def advice(reason: str) -> str:
    """Return what to ask for instead, of a job that waits for a reason that will not pass; empty for others."""
    found = next((text for pattern, text in _ADVICE if re.search(pattern, reason)), "")
    return f"{found}{_ELSEWHERE}" if found else ""


def sinfo(queue: str | None) -> Command:
    """Return the sinfo for the nodes of a partition, or of all."""
    where = (f"--partition={queue}",) if queue else ()
    return Command(("sinfo", "--noheader", "--exact", f"--format={_FIELDS}", *where))


def read_sinfo(result: Result, gpu_type: str = "") -> tuple[Offer, ...]:
    """Return what sinfo lists, of the default partition if none was asked for; nothing if it did not answer.

    Parameters
    ----------
    result : Result
        Of :func:`sinfo`.
    gpu_type : str
        Count GPUs of this type only; empty for all.

    """
    asked = any(word.startswith("--partition=") for word in result.argv)
    return tuple(_offers(result.stdout, gpu_type, all_=asked)) if result.returncode == 0 else ()


def _offers(text: str, gpu_type: str, *, all_: bool) -> Iterator[Offer]:
    for line in text.splitlines():
        fields = line.strip().split("|", 7)
        if len(fields) == 8 and fields[2].isdecimal() and (all_ or fields[1].endswith("*")):
            queue, _, nodes, limit, size, cpus, memory, gres = fields
            counts = [int(n) for kind, n in _GPUS.findall(gres) if gpu_type in ("", kind)]
            yield Offer(
                queue=queue,
                nodes=int(nodes),
                gpus=sum(counts),
                cpus=int(cpus) if cpus.isdecimal() else None,
                memory_bytes=int(memory) << 20 if memory.isdecimal() else None,
                most_nodes=int(most) if (most := size.rpartition("-")[2]).isdecimal() else None,
                walltime_s=_limit_s(limit),
            )


def _limit_s(text: str) -> int | None:
    try:
        return parse_duration_s(text)
    except ConfigError:  # infinite, n/a
        return None
