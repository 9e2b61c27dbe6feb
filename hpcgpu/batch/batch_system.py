"""The interface of batch systems, and what they share: arrays, advice for pending jobs, time limits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hpcgpu.errors import ConfigError, SubmitError, opt, plain
from hpcgpu.model import Command, CpuSet, JobSpec, JobStatus, Offer, Result
from hpcgpu.units import parse_duration_s

# Reasons and comments of jobs that wait for ever unless they or the cluster change (Slurm 22.05.8: main.c, and tests;
# OpenPBS: tests/data/batch/pbs). The reasons for nodes that are down are different.
_ADVICE = (
    (r"PartitionNodeLimit|M(ax|in)Nodes?PerJob", f"fewer {opt('nodes')}"),
    (
        r"PartitionTimeLimit|MaxWallDurationPerJob|resource: walltime|would conflict with|Reserved for maintenance",
        f"a shorter {opt('walltime')}",
    ),
    (r"MaxGRESPerJob|resource: (ngpus|gpus)", f"fewer {opt('gpus_per_node')}"),
    (r"MaxCpuPerJob|resource: ncpus", f"fewer {opt('cores_per_gpu')}"),
    (r"MaxMem\w*PerJob|resource: mem", f"less {opt('memory')}"),
    (r"PartitionConfig|BadConstraints|Can Never Run", "less"),
    (r"AccountNotAllowed|InvalidAccount", f"another {opt('account')}"),
    (r"Q[oO][sS]NotAllowed|InvalidQOS", f"another --qos in {opt('job_extra_directives')}"),
)


class BatchSystem(Protocol):
    """The questions to a batch system: for each one a command, and a method that parses its result.

    A ``read_`` method raises :class:`~hpcgpu.errors.SubmitError`, with the program's message, when the question itself
    failed; ``transient`` tells whether to ask again. An unknown state is ``UNKNOWN``, never an error.
    """

    __slots__ = ()
    array_limit: int = 1  # the most elements of an array; 1: no arrays
    memory: str  # the option for a job's memory; none if the site has no such option
    cpus: bool  # whether the site has an option for cores

    def script(self, spec: JobSpec) -> str:
        """Return the job script: options, prologue, environment, and one quoted command whose exit code is the job's.

        Raises ConfigError if an option of the batch system cannot carry a value.
        """

    def log(self, spec: JobSpec, job_id: str) -> str:
        """Return the path of the job's output, relative to the folder of submission if no folder was given."""

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return messages about such a request, for people: parts of it for which the site has no option."""
        parts = {
            "memory": spec.memory_per_node_bytes is not None and self.memory == "none",
            "cores_per_gpu": spec.cpus_per_task is not None and not self.cpus,
        }
        return tuple(
            f"{plain(opt(name))} is not asked of the batch system: at this site jobs get it with their GPUs or nodes"
            for name, is_given in parts.items()
            if is_given
        )

    def version(self) -> Command | None:
        """Return the command that tells the batch system's version; None if any will do."""
        return None

    def read_version(self, result: Result) -> None:
        """Raise HpcGpuError for a version that is too old."""

    def submit(self, script: str, spec: JobSpec) -> Command:
        """Return the command that submits the script, which it reads from its standard input."""

    def read_submit(self, result: Result) -> str:
        """Return the job id. After an error that is ``unsure`` the job may have been submitted nevertheless."""

    def find(self, name: str, mark: str) -> Command | None:
        """Return the command that lists the jobs with this name and mark; None if jobs have no mark."""

    def read_found(self, result: Result, mark: str) -> tuple[str, ...]:
        """Return the ids for a call of ``status``, which lists the elements of arrays and whether they have ended."""

    def elements(self, job_id: str, count: int) -> tuple[str, ...]:
        """Return the ids of the ``count`` jobs that were submitted as ``job_id``, by their index in the array."""

    def status(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for all these jobs and elements; its length does not grow with the elements."""

    def history(self, job_ids: Sequence[str]) -> Command:
        """Return one command that asks for jobs that ``status`` no longer lists, or lists without their end."""

    def read_status(self, result: Result, job_ids: Sequence[str] = ()) -> Mapping[str, JobStatus]:
        """Parse the output of ``status`` or ``history``: elements instead of arrays, and perhaps other jobs.

        A job that is not listed is missing, not ended. ``job_ids`` are the jobs that were asked for: of an array that
        is gone the batch system lists no elements, but they have ended with it.
        """

    def offers(self, spec: JobSpec) -> Command | None:
        """Return the command that lists the nodes for such a job; None if it is not asked, or not compared."""
        return None

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return the nodes of each kind and the limits; empty without an answer."""
        return ()

    def test(self, script: str) -> Command | None:
        """Return the command that checks a script from its standard input and submits nothing; None without one."""
        return None

    def read_test(self, result: Result) -> str:
        """Return the expected start of such a job in the batch system's format; raise SubmitError if refused."""
        return ""

    def nodes(self, hosts: Sequence[str]) -> Command | None:
        """Return the command that asks for the state of these nodes; None if there is only this machine."""

    def read_nodes(self, result: Result) -> Mapping[str, str]:
        """Return the trouble of each lost node; empty without an answer."""

    def onto(self, job_id: str, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of a running job, its stdin and stdout connected."""

    def cancel(self, job_ids: Sequence[str]) -> tuple[Command, ...]:
        """Return the commands that end these jobs and elements, pending or running: as few as are safe."""

    def read_cancel(self, result: Result) -> bool:
        """Return False if a job was gone or ending already; the command's other jobs are ended nevertheless."""

    def grace(self, job_id: str) -> tuple[Command, ...]:
        """Return the commands that ask when a job is killed that got SIGTERM."""
        return ()

    def read_killed_s(self, results: Sequence[Result], came_s: float) -> float:
        """Return that time, in seconds since the epoch; that of the signal, ``came_s``, if they do not tell."""
        return came_s

    def requeue(self, job_id: str) -> Command:
        """Return the command that ends a running job, which then starts again under its id."""

    def read_requeue(self, result: Result) -> None:
        """Raise SubmitError if a job will not start again."""

    def resubmit(self, result: Result, job_id: str) -> Command | None:
        """Return the command that submits the like of a running job, to start at its end; None if nothing tells how.

        The result is of ``status``.
        """
        return None

    def force(self, result: Result) -> Command | None:
        """Return the command that ends a job whose node does not answer ``cancel``; None for other failures.

        The result names one such job at a time: try ``cancel`` again.
        """
        return None


def last_of(ids: Sequence[str], program: str, result: Result) -> str:
    """Return the id that a submission has named; SubmitError for none: a wrapper may have put it in a sentence."""
    if not ids:
        raise SubmitError(f"{program} has named no job: {result.output}", evidence=result.output, unsure=True)
    return ids[-1]


def advice(reason: str) -> str:
    """Return what to ask for instead if a job's reason for waiting will not pass; "" for other reasons."""
    instead = next((text for pattern, text in _ADVICE if re.search(pattern, reason)), "")
    return plain(f"{instead}, or another {opt('queue')}") if instead else ""


def by_array(job_ids: Sequence[str], element: re.Pattern[str]) -> Mapping[tuple[str, str], set[int]]:
    """Group ids by array: the parts of its elements' ids before and after the index, and the indexes.

    ``element`` matches an element's id in three groups: before the index, the index, after it. Another job is alone,
    without an index.
    """
    out: dict[tuple[str, str], set[int]] = {}
    for job_id in job_ids:
        match = element.fullmatch(job_id)
        indexes = out.setdefault((match[1], match[3]) if match else (job_id, ""), set())
        if match:
            indexes.add(int(match[2]))
    return out


def index_runs(indexes: Iterable[int]) -> tuple[str, ...]:
    """Return single indexes and ranges without a hole, in order: ``1``, ``3-4`` for 1, 3, 4."""
    return tuple(filter(None, str(CpuSet(indexes)).split(",")))


def limit_s(text: str) -> int | None:
    """Parse a time limit, ``01:30:00``, into seconds; None: unlimited, or unknown."""
    try:
        return parse_duration_s(text)
    except ConfigError:  # infinite, n/a
        return None
