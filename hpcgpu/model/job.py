"""Jobs: their request, state and status, and nodes on offer for them; and commands, which only :mod:`hpcgpu.host` runs.

Together: a batch system makes commands of a request for a job, and the state of jobs of the results.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hpcgpu.errors import ConfigError

TIMED_OUT = 124  # a command's exit code, as timeout(1) has it
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
