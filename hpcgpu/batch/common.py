"""The interface and the common parts of batch systems: job scripts, options, arrays, advice for pending jobs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpcgpu.errors import ConfigError, SubmitError, opt
from hpcgpu.model import Command, CpuSet, JobSpec, JobStatus, Offer, Result
from hpcgpu.model.allocation import DOCUMENT

_WHERE = "job_extra_directives or job_directives_skip:"
NUMBER_OF_JOBS = f"how many jobs there are is said by {opt('nodes')}, or by scale() with {opt('shape', 'elastic')}"
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


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
            "memory=": spec.memory_per_node_bytes is not None and self.memory == "none",
            "cores_per_gpu=": spec.cpus_per_task is not None and not self.cpus,
        }
        return tuple(
            f"{name} is not asked of the batch system: at this site jobs get it with their GPUs or nodes"
            for name, is_given in parts.items()
            if is_given
        )

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

    def force(self, result: Result) -> Command | None:
        """Return the command that ends a job whose node does not answer ``cancel``; None for other failures.

        The result names one such job at a time: try ``cancel`` again.
        """
        return None


def unnamed(program: str, result: Result) -> SubmitError:
    """Return the error for a submission that has named no job: a site's wrapper may have put the id into a sentence."""
    return SubmitError(f"{program} has named no job: {result.output}", evidence=result.output, unsure=True)


@dataclass(frozen=True, slots=True)
class Directive:
    """One option of a script."""

    key: str  # its name: --constraint
    text: str  # in the script


def script_body(spec: JobSpec, before: tuple[str, ...] = (), index: str = "") -> tuple[str, ...]:
    """Return the script below its options, with the command's exit code; ``index`` is the array index's variable."""
    command = shlex.join(spec.argv)
    document = f"{DOCUMENT}={shlex.quote(spec.document)} " if spec.document else ""
    if not (spec.exit_file or spec.warn_s):
        return (*before, *spec.prologue, f"{document}{command}", "")
    # A bash that SIGTERM ends would write 0 to the file (5.2). So it catches the signal, in the prologue to end with
    # 143.
    file = exit_file(spec, index)
    record = (f"trap {shlex.quote(f'code=$?; umask 77; echo $code > {file}')} EXIT",) if spec.exit_file else ()
    first = (*record, "trap 'exit 143' TERM", "trap : USR1")
    return (*before, *first, *spec.prologue, *_waited_for(f"{document}exec {command}"), "")


def exit_file(spec: JobSpec, index: str) -> str:
    """Return bash code for the exit file of a job, or of each element of its array."""
    return shlex.quote(spec.exit_file) + (f'."${index}"' if spec.count > 1 else "")


def _waited_for(command: str) -> tuple[str, ...]:
    """Return shell lines that run ``exec …``, wait for its end, and forward the batch system's SIGUSR1 to it."""
    # Only the script gets that warning (Slurm's --signal=B:), and bash handles it only in wait and read,
    # not while a command runs in the foreground. After a caught signal wait forgets the exit code of a command that
    # ends meanwhile (bash 5.2.15: 255 in one of nine runs), so a second bash waits, catches nothing, and tells the
    # first. SIGTERM is not forwarded: the batch system sends it to the ranks too, and a srun that gets one kills them
    # at once (Slurm 22.05.8).
    return (
        "{",  # read as a whole, so that a command that reads the script's stdin cannot eat the rest of it
        "    exec {out}>&1",
        "    job= warned=",
        "    trap : TERM",
        """    trap 'warned=1; kill -USR1 $job 2>/dev/null || :' USR1""",
        "    exec {told}< <(",
        # Caught, not ignored, also above: the command is to have SIGTERM's default.
        "        trap : TERM USR1",
        "        (",
        # Ignored until srun, mpirun or the rank itself listens: an early warning must not end it.
        "            trap '' USR1",
        '            echo "$BASHPID"',
        f"""            {command} >&"$out" {{out}}>&-""",
        '        ) && echo 0 || echo "$?"',  # both: a prologue may have said `set -e`
        "    )",
        "    exec {out}>&-",
        "    read -r job <&$told",
        '    [ -z "$warned" ] || kill -USR1 "$job" 2>/dev/null || :',  # it came before it was known whose it is
        # A signal that comes just before read waits is looked at when it returns (bash 5.2.15, under load).
        # And one whose time is over may have taken a part of the line: 0, and then there is only the line's end.
        "    code=",
        "    until read -r -t 5 part <&$told; ended=$?; code+=$part; ((ended <= 128)); do :; done",
        '    exit "${code:-137}"',  # no exit code was told: the waiting bash was killed
        "}",
    )


def options_in(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield (option, value) of the user's text: ``--a=b``, ``-a b``, ``-ab``, ``--flag``; or raise ConfigError."""
    refuse_control(text, "job_extra_directives")
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{_WHERE} {text!r} is not an option of the batch system: {error}") from error
    if not parts or not parts[0].startswith("-") or parts[0] in ("-", "--"):
        raise ConfigError(
            f"{_WHERE} {text!r} is not an option of the batch system; allowed: '--constraint=a100', '-C a100'"
        )
    option: str | None = None
    value: str | None = None
    for part in parts:
        if part.startswith("-"):
            if option:
                yield option, value
            # --a=b and -ab have both parts in one.
            name, equals, rest = part.partition("=") if part.startswith("--") else (part[:2], "", part[2:])
            option, value = name, rest if equals else rest.removeprefix("=") or None
        elif value is None:
            value = part
        else:
            raise ConfigError(
                f"{_WHERE} {text!r}: {part!r} belongs to no option; quote a value with blanks, or give two options"
            )
    if option:
        yield option, value


def merge_options(
    ours: list[Directive],
    extra: list[Directive],
    skipped: tuple[str, ...],
    key: Callable[[str], set[str]],
    refused: Mapping[str, str],
    forbidden: Mapping[str, str],
) -> list[Directive]:
    """Return hpcgpu's options that the user neither skips nor gives, then the user's, in their order."""
    # refused are options that the user may not give, each with its alternative; forbidden are options that the site
    # refuses, from anybody, each with its rule. Options are compared by name (key knows the short names), never as
    # parts of a text: with dask-jobqueue 0.9 and job_directives_skip=["-n"] the partition is lost if its name contains
    # "-n".
    for directive in extra:
        if instead := refused.get(directive.key):
            raise ConfigError(f"job_extra_directives: {directive.text!r} is not for this: {instead}")
    dropped = {name for text in skipped for name in key(text)} | {d.key for d in extra}
    kept = [d for d in ours if d.key not in dropped and d.key.partition(" ")[0] not in dropped] + extra
    for directive in kept:
        if rule := forbidden.get(directive.key):
            raise ConfigError(f"{directive.text!r} is in the job's script, but {rule}")
    return kept


def refuse_control(value: str, what: str) -> str:
    """Return the value, or raise ConfigError if it has a line break or another control character."""
    if match := _CONTROL.search(value):
        raise ConfigError(f"{what}: {value!r} has the character {match[0]!r}, which no line of a script can carry")
    return value


# Reasons and comments of jobs that wait for ever unless they or the cluster change (Slurm 22.05.8: main.c, and tests;
# OpenPBS: tests/data/batch/pbs). The reasons for nodes that are down are different.
_ADVICE = (
    (r"PartitionNodeLimit|M(ax|in)Nodes?PerJob", "fewer nodes="),
    (
        r"PartitionTimeLimit|MaxWallDurationPerJob|resource: walltime|would conflict with|Reserved for maintenance",
        "a shorter walltime=",
    ),
    (r"MaxGRESPerJob|resource: (ngpus|gpus)", "fewer gpus_per_node="),
    (r"MaxCpuPerJob|resource: ncpus", "fewer cores_per_gpu="),
    (r"MaxMem\w*PerJob|resource: mem", "less memory="),
    (r"PartitionConfig|BadConstraints|Can Never Run", "less"),
    (r"AccountNotAllowed|InvalidAccount", "another account="),
    (r"Q[oO][sS]NotAllowed|InvalidQOS", "another --qos in job_extra_directives="),
)


def advice(reason: str) -> str:
    """Return what to ask for instead if a job's reason for waiting will not pass; "" for other reasons."""
    return next((f"{text}, or another queue=" for pattern, text in _ADVICE if re.search(pattern, reason)), "")


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


def index_runs(indexes: Iterable[int]) -> tuple[str, ...]:
    """Return single indexes and ranges without a hole, in order: ``1``, ``3-4`` for 1, 3, 4."""
    return tuple(filter(None, str(CpuSet(indexes)).split(",")))
