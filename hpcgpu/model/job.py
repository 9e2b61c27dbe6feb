"""A job as it is asked for (:class:`JobSpec`), as it is (:class:`JobStatus`), and what there is (:class:`Offer`)."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from hpcgpu.errors import ConfigError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A path may hold any byte, which Python shows as U+DC80 to U+DCFF; no other lone surrogate has bytes at all.
_NO_BYTES = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


class JobState(enum.Enum):
    """States to which those of all batch systems are mapped. ``UNKNOWN`` is a state, not an error.

    ``HELD``: a person has put the job on hold. ``STUCK``: the job failed to start and is not tried again, or it asks
    for more than there is.
    """

    PENDING = "pending"
    HELD = "held"
    STUCK = "stuck"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"
    UNKNOWN = "unknown"


WAITING = (JobState.PENDING, JobState.HELD, JobState.STUCK)
"""States of a job that has not started, or is to be started again."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of one job; ``native`` and ``reason`` keep the batch system's own words.

    ``starts`` is the expected start of a pending job, as the batch system writes it; empty: unknown. ``advice`` says
    what to ask for instead if a job waits for more than it may have, or than there is: ``fewer nodes=``. ``hosts`` are
    the nodes of a running job, or of a job that ended with a node, as far as the batch system tells them. ``trouble``
    is what is wrong with one of them, ``node2 is down``, also for a job that waits to be requeued on others, or says
    that a job is ending, ``in state COMPLETING``. ``is_ending``: the job runs, but is on its way out.
    """

    state: JobState
    native: str
    reason: str = ""
    exit_code: int | None = None
    starts: str = ""
    advice: str = ""
    hosts: tuple[str, ...] = ()
    trouble: str = ""
    is_ending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One request to a batch system: one job of ``nodes`` nodes.

    Attributes
    ----------
    argv : tuple of str
        The command of the job; quoted only in ``batch.script``.
    tasks_per_node : int
        Ranks with GPUs. The scheduler's rank is one more, on node 0, and has no task of its own: the launcher's
        command inside the job allows it (Slurm 22.05: ``srun -n9 -O`` on 2 nodes with 4 tasks).
    extra_directives : tuple of str
        The user's own options as they would stand in a script, ``--constraint=a100`` or ``-C a100``; each
        replaces ours of the same name.
    skipped_directives : tuple of str
        Options of ours to leave out.
    arguments : str
        Shell text after the command, for templates: ``"$@"``.
    exit_file : str
        Where the script writes its exit code, for batch systems that forget ended jobs; empty: nowhere. Each job of an
        array has its own file: its index is appended, ``exit.3``.
    count : int
        The number of jobs; several jobs are submitted together, as an array.
    warn_s : int
        How long before the time limit the ranks get SIGUSR1, if the batch system can do so; 0: never.
    mark : str
        A mark of all jobs of a run, by which they are found in the batch system, if it can carry one; empty: none.

    Raises
    ------
    ConfigError
        The job has no node, no name or no command, or a text that no script can carry.

    """

    name: str
    argv: tuple[str, ...]
    walltime_s: int | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    memory_per_node_bytes: int | None = None
    queue: str | None = None
    account: str | None = None
    prologue: tuple[str, ...] = ()
    extra_directives: tuple[str, ...] = ()
    skipped_directives: tuple[str, ...] = ()
    log_directory: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    arguments: str = ""
    exit_file: str = ""
    count: int = 1
    warn_s: int = 0
    mark: str = ""

    def __post_init__(self) -> None:
        if not self.name or not self.argv:
            raise ConfigError(f"a job needs a name and a command; given: {self.name!r} and {self.argv!r}")
        for what, least in (("nodes", 1), ("tasks_per_node", 1), ("gpus_per_node", 0), ("count", 1)):
            if getattr(self, what) < least:
                raise ConfigError(f"{what}={getattr(self, what)} of job {self.name!r}; allowed: {least} or more")
        for name, _ in self.env:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"{name!r} is no name of an environment variable; allowed: letters, digits and _")
        values = (
            self.name,
            self.queue,
            self.account,
            self.log_directory,
            self.exit_file,
            self.arguments,
            self.mark,
            *self.argv,
        )
        more = (*self.prologue, *self.extra_directives, *self.skipped_directives, *(value for _, value in self.env))
        for value in (*values, *more):
            if value and (found := _NO_BYTES.search(value)):
                raise ConfigError(f"{value!r} has the character {found[0]!r}, which no command can carry; take it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Nodes of one kind in a queue. None: unknown, or unlimited.

    Attributes
    ----------
    nodes : int
        Their number, including nodes that are down.
    gpus, cpus : int or None
        Of each node.
    memory_bytes : int or None
        Of each node.
    most_nodes : int or None
        The most nodes that the queue gives to one job.
    walltime_s : int or None
        The queue's time limit.

    """

    queue: str
    nodes: int
    gpus: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    most_nodes: int | None = None
    walltime_s: int | None = None
