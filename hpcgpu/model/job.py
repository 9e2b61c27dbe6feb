"""The run document of the rank program; jobs and nodes on offer; and commands, which only :mod:`hpcgpu.host` runs.

Together: a run's document, jobs and commands are what batch systems and rank program hand each other.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hpcgpu.errors import ConfigError
from hpcgpu.model.settings import Settings

TIMED_OUT = 124  # a command's exit code, as timeout(1) has it
# Some sites' qstat or squeue answers from a file that is minutes old (NCAR): a new job is in the next one.
UNLISTED_S = 300.0
VERSION = 2
# Python decodes a path's undecodable bytes as U+DC80 to U+DCFF; no other lone surrogate can be encoded.
_NO_BYTES = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


@dataclass(frozen=True, slots=True)
class Command:
    """An argv (never a shell line) with its standard input, environment and time limit."""

    argv: tuple[str, ...]
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # added to the environment
    timeout_s: float = 60.0
    without: frozenset[str] = frozenset()  # variables to remove from the environment; SQUEUE_*: all that begin so

    def removed(self, environ: Iterable[str]) -> list[str]:
        """Return the names in the environment that the program does not get."""
        prefixes = tuple(name[:-1] for name in self.without if name.endswith("*"))
        return [name for name in environ if name in self.without or name.startswith(prefixes)]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one :class:`Command`."""

    argv: tuple[str, ...]
    returncode: int  # 127: the program does not exist; TIMED_OUT: killed after timeout_s
    stdout: str = ""
    stderr: str = ""

    @property
    def message(self) -> str:
        """Return the program's errors, else its output, for a message; never empty."""
        return self.stderr.strip() or self.stdout.strip() or f"exit code {self.returncode}, no output"

    @property
    def output(self) -> str:
        """Return the errors and the output, as a site's wrapper may give its reason in either; never empty."""
        return "\n".join(filter(None, (self.stderr.strip(), self.stdout.strip()))) or self.message


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was left running; pid and start time identify it, as pids are reused."""

    pid: int
    start_time: int  # in clock ticks since boot


@dataclass(frozen=True, slots=True)
class Backoff:
    """Count failures in a row, and compute the wait before the next try."""

    first_s: float = 0.5  # the wait after the first failure; doubles with each further one
    longest_s: float = 30.0  # the longest wait
    calm_s: float = 60.0  # after so long without a failure, the next one counts as the first
    failures: int = 0  # in a row, so far
    wait_s: float = 0.0  # before the next try
    is_new: bool = False  # the last failure has a reason that was not reported before
    reported: frozenset[str] = frozenset()
    failed_s: float = float("-inf")

    def failed(self, reason: str, now_s: float) -> Backoff:
        """Return the backoff after one more failure; ``now_s`` is of a monotonic clock."""
        is_calm = now_s - self.failed_s >= self.wait_s + self.calm_s
        before = replace(self, failures=0, reported=frozenset()) if is_calm else self
        return replace(
            before,
            failures=before.failures + 1,
            wait_s=min(self.longest_s, self.first_s * 2.0 ** min(before.failures, 64)),
            is_new=reason not in before.reported,
            reported=before.reported | {reason},
            failed_s=now_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Waits for the batch system's answers, and all intervals of questions: no options, since all users share it."""

    # a submission without an answer is killed then; the job may have been submitted nevertheless
    submission_s: float = 60.0
    # after each wait the job is submitted again or, if the answer was lost, searched for
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0, 4.0)
    ask_s: float = 5.0  # between two polls when something is new, and a guard's searches for jobs of a lost answer
    news_s: float = 1.0  # between two polls when news is likely, and before the first poll
    longest_s: float = 60.0  # between two polls of a job without news
    growth: float = 6.0  # until then the interval is the time since the last change, divided by this
    refused_s: float = 30.0  # before the next submission after a transient refusal, or the next poll after no answer
    # before the next submission after a lost answer, while no answer of a search or a poll has listed its job
    unlisted_s: float = UNLISTED_S
    by_itself_s: float = 0.5  # between two polls of jobs that are about to end by themselves
    # such a poll is cut off then: squeue tells after 40 s that slurmctld is away (22.05.8), or later (SlurmctldTimeout)
    silence_s: float = 3.0
    # between the first two polls of cancelled jobs, then half as much again each time until ``guard_s``: most are gone
    # within a second, others only after the batch system's KillWait
    cancelled_s: float = 0.25
    # between two cancels: one takes effect within the batch system's KillWait, a refused one may be accepted later
    cancel_s: float = 15.0
    guard_s: float = 2.0  # between polls by a guard or the doctor, and all polls while the batch system is away


@dataclass(frozen=True, slots=True)
class RunDocument:
    """Describe a run, without secrets and without facts about a node: each node plans its bindings in the job."""

    settings: Settings = field(default_factory=Settings)
    # gang: a job with a client outside; in-allocation; head: a scheduler without workers, with a client outside;
    # member: workers that join the cluster whose folder is ``folder``
    shape: str = "in-allocation"
    script: tuple[str, ...] = ()  # argv of the user's script, run by rank 0; empty: a client outside drives the cluster
    # on a shared file system, for the files of the rendezvous and of the client; empty: the ranks meet by MPI, and
    # there is no client outside
    folder: str = ""
    # identifier of this launch, if ranks meet by files; empty under another launcher, and until ``hpcgpu launch``
    # starts them
    launch: str = ""
    exit_file: str = ""  # where rank 0 writes its exit code; empty: the program that started it returns the code
    version: int = VERSION


class JobState(enum.Enum):
    """States to which those of all batch systems are mapped. ``UNKNOWN`` is a state, not an error."""

    PENDING = "pending"
    HELD = "held"  # by a person
    STUCK = "stuck"  # failed to start and is not tried again, or asks for more than exists
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"
    UNKNOWN = "unknown"


WAITING = (JobState.PENDING, JobState.HELD, JobState.STUCK)
"""States of a job that has not started, or is to be started again."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of one job; ``native`` and ``reason`` keep the batch system's words."""

    state: JobState
    native: str
    reason: str = ""
    exit_code: int | None = None
    starts: str = ""  # expected start of a pending job, in the batch system's format; empty: unknown
    # what to ask for instead, if the job waits for more than it may have or than exists: ``fewer nodes=``
    advice: str = ""
    # nodes of a running job, or of one that ended with a node, as far as the batch system reports them
    hosts: tuple[str, ...] = ()
    # of a host, ``node2 is down``, also while the job waits for a requeue; or ``in state COMPLETING``: it is ending; or
    # ``started 21 times`` of a job that waits; or how PBS ended it, ``Exit_status -29: its walltime was over``
    trouble: str = ""
    is_ending: bool = False  # runs, but is on its way out
    limit_s: int | None = None  # the walltime that the job has; None: unlimited, or not told


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Request one job of ``nodes`` nodes; raise ConfigError without node, name or command, or with unusable text."""

    name: str
    argv: tuple[str, ...]  # quoted only in batch.script
    walltime_s: int | None = None
    nodes: int = 1
    # Ranks with GPUs. The scheduler's rank is one more, on node 0, and has no task: the launcher's command inside the
    # job allows it (Slurm 22.05: ``srun -n9 -O`` on 2 nodes with 4 tasks).
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    memory_per_node_bytes: int | None = None
    queue: str | None = None
    account: str | None = None
    prologue: tuple[str, ...] = ()
    # the user's, as in a script: ``--constraint=a100``, ``-C a100``; each replaces ours of the same name
    extra_directives: tuple[str, ...] = ()
    skipped_directives: tuple[str, ...] = ()  # options of ours to leave out
    log_directory: str | None = None
    # Where the script writes its exit code, for batch systems that forget ended jobs; empty: nowhere. Each job of an
    # array has a file of its own, with its index appended: ``exit.3``.
    exit_file: str = ""
    count: int = 1  # of jobs; several are submitted as an array
    warn_s: int = 0  # before the time limit ranks get SIGUSR1, if the batch system can send it; 0: never
    requeue: bool = False  # the job may be requeued, also where that is not the batch system's default
    document: str = ""  # the run document, a variable of the command alone; empty: it has none
    mark: str = ""  # carried by all jobs of a run, to find them in the batch system; empty: none

    def __post_init__(self) -> None:
        if not self.name or not self.argv:
            raise ConfigError(f"a job needs a name and a command; given: {self.name!r} and {self.argv!r}")
        for name, least in (("nodes", 1), ("tasks_per_node", 1), ("gpus_per_node", 0), ("count", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} of job {self.name!r}; allowed: {least} or more")
        texts = (self.name, self.queue, self.account, self.log_directory, self.exit_file, self.mark)
        lists = (self.argv, self.prologue, self.extra_directives, self.skipped_directives)
        for value in (*texts, *(value for values in lists for value in values)):
            if value and (match := _NO_BYTES.search(value)):
                raise ConfigError(f"{value!r} has the character {match[0]!r}, which no command can carry; take it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Nodes of one kind in a queue. None: unknown, or unlimited."""

    queue: str
    nodes: int  # including nodes that are down
    gpus: int | None = None  # of each node, as cpus and memory_bytes
    gpu: str = ""  # their type; "": several, or unknown
    cpus: int | None = None
    memory_bytes: int | None = None
    fewest_nodes: int | None = None  # that the queue gives to one job
    most_nodes: int | None = None
    walltime_s: int | None = None  # the queue's time limit
    is_default: bool = False  # the queue is the default one
